"""The command line: `seawall demo | generate | score | plan | doctor | bench | serve`."""
