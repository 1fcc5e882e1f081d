"""What holds for all tests."""

import gc
import signal

# What whoever starts the tests has them ignore (nohup, a shell's background), every command would ignore that a test starts and then ends by it.
# A handler that does nothing ignores it here alone.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)


def pytest_collection_finish() -> None:
    """What the imports left is for all tests: the collector need not walk through it again at each of them."""
    gc.collect()
    gc.freeze()
