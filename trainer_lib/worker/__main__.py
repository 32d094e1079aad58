"""``python -m trainer_lib.worker <verb> <run dir>``: one rank of one request."""

import sys

from trainer_lib.worker.process.session import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
