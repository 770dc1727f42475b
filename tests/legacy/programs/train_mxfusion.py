# pip install mxfusion==0.3.1 networkx
import mxnet as mx
from mxfusion import Model, Variable
from mxfusion.components.distributions import Normal
from mxfusion.components.variables import PositiveTransformation
from mxfusion.inference import MAP, GradBasedInference

model = Model()
model.mean = Variable()
model.variance = Variable(transformation=PositiveTransformation())
model.Y = Normal.define_variable(mean=model.mean, variance=model.variance, shape=(100,))
inference = GradBasedInference(inference_algorithm=MAP(model=model, observed=[model.Y]))
inference.run(Y=mx.nd.random.normal(3, 2, shape=(100,)), learning_rate=0.1, max_iter=200)
print(inference.params[model.mean].asscalar(), inference.params[model.variance].asscalar())
