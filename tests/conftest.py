import gluon_mgpu

gluon_mgpu.configure(contexts=5)  # before any test module imports mxnet
