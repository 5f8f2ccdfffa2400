"""`python -m seawall.eval ...`: the harness's own command line, with the model `seawall` added.

The harness finds models in a table of its own and reads no entry points, so `lm_eval` by itself
cannot know this one.
"""

import sys

try:
    from seawall.eval.lm_eval_model import main
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "lm_eval":
        raise
    sys.exit("seawall.eval: lm-eval is not installed; run pip install 'seawall[eval]'")

if __name__ == "__main__":
    main()
