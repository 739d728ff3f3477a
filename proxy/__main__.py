"""`python -m proxy` is the command `kvlane`."""

from proxy.cli import main

if __name__ == "__main__":
    main(prog_name="kvlane")
