"""Entry point of `python -m dispatcher.lab.standin`."""

from dispatcher.lab.standin.live import main

if __name__ == "__main__":
    main()
