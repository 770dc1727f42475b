import signal

import gluon_mgpu

gluon_mgpu.configure(contexts=5)  # before any test module imports mxnet

# Ignored where the suite is started in the background of a script, and then by all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
