"""What holds for all tests."""

import signal

# Whoever starts the tests in the background may have them ignore Ctrl-C, and so would every command that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
