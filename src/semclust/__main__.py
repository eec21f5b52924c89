"""`python -m semclust`, the same as the command `semclust`."""

from semclust.cli import main

if __name__ == "__main__":
    main()
