"""The LeNet: inputs, outputs, and features."""

import torch

from fmwc.networks import LeNet


def test_features_are_the_input_of_the_last_layer():
    judge, x = LeNet(side=8).eval(), torch.rand(5, 1, 8, 8)
    features = judge.features(x)
    assert features.min() >= 0  # after a ReLU
    torch.testing.assert_close(judge(x), features @ judge.out.weight.T + judge.out.bias)


def test_evaluation_does_not_depend_on_the_batch():
    judge, x = LeNet(side=8), torch.rand(4, 1, 8, 8)
    assert not torch.allclose(
        judge(x)[:2], judge(x[:2]), atol=1e-4
    )  # in training mode, norms use the statistics of the batch
    judge.eval()
    torch.testing.assert_close(judge(x)[2:3], judge(x[2:3]))
