"""`python -m accel_gpt COMMAND ...` does what `accel-gpt COMMAND ...` does.

`python -m` puts the working folder first on the path of imports, so a `random.py` in it would be
executed in place of Python's module. This file takes the folder off the path. What Python imports
before this file, such as `types`, is still looked up there; `accel-gpt` and `python -P -m
accel_gpt` look up nothing there.
"""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]
    from accel_gpt.cli import main

    main()
