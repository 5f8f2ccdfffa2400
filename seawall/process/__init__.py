"""Starting, watching and ending engine processes, and talking to them; knows no engine."""
