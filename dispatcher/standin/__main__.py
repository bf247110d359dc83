"""`python -m dispatcher.standin`."""

from dispatcher.standin.live import main

if __name__ == "__main__":
    main()
