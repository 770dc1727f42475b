# pip install gluonnlp==0.10.0
import gluonnlp as nlp
import mxnet as mx
from mxnet import autograd, gluon

ctx = mx.gpu(0)
encoder = nlp.model.BERTEncoder(units=32, hidden_size=64, max_length=16, num_layers=2, num_heads=4)
vocab = nlp.Vocab(nlp.data.count_tokens("a b c d e f g".split()))
bert = nlp.model.BERTModel(
    encoder, len(vocab), token_type_vocab_size=2, units=32, embed_size=32, use_decoder=False, use_classifier=False
)
bert.initialize(mx.init.Normal(0.02), ctx=ctx)
bert.hybridize()
classifier = gluon.nn.Dense(2)
classifier.initialize(ctx=ctx)
trainer = gluon.Trainer({**bert.collect_params(), **classifier.collect_params()}, "adam", {"learning_rate": 0.01})
loss = gluon.loss.SoftmaxCrossEntropyLoss()
words = mx.nd.array([vocab["a b c d".split()], vocab["e f g a".split()]], ctx=ctx)
for _ in range(5):
    with autograd.record():
        pooled = bert(words, mx.nd.zeros((2, 4), ctx), mx.nd.full((2,), 4, ctx))[1]
        value = loss(classifier(pooled), mx.nd.arange(2, ctx=ctx)).mean()
    value.backward()
    trainer.step(2, ignore_stale_grad=True)
    print(value.asscalar())
