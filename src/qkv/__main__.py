"""`python -m qkv`, and what torchrun launches."""

from qkv.cli import main

if __name__ == "__main__":
    main()
