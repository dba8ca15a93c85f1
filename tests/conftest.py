"""For all tests."""

import signal
import threading

# Shells start background jobs with Ctrl-C ignored, and processes that the tests start would inherit that.
if (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):
    signal.signal(signal.SIGINT, signal.default_int_handler)
