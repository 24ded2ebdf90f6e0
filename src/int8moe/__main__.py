"""`python -m int8moe` is the command line."""

from int8moe.cli.main import main

if __name__ == "__main__":
    main()
