"""The LeNet: inputs, outputs, and features."""

import pytest
import torch

from fmwc.errors import ShapeError
from fmwc.networks import LeNet


@pytest.mark.parametrize("side", [4, 8, 28, 30])
@pytest.mark.parametrize("classes", [2, 10])
def test_shapes(side, classes):
    judge = LeNet(classes, side).eval()
    x = torch.rand(3, 1, side, side)
    assert judge(x).shape == (3, classes)
    assert judge.features(x).shape == (3, 84)


def test_features_are_the_input_of_the_last_layer():
    judge, x = LeNet(side=8).eval(), torch.rand(5, 1, 8, 8)
    features = judge.features(x)
    assert features.min() >= 0  # after a ReLU
    torch.testing.assert_close(judge(x), features @ judge.out.weight.T + judge.out.bias)


def test_output_depends_on_every_pixel():
    x = torch.rand(1, 1, 8, 8, requires_grad=True)
    LeNet(side=8).eval()(x).square().sum().backward()
    assert x.grad.ne(0).double().mean() > 0.9


def test_evaluation_does_not_depend_on_the_batch():
    judge, x = LeNet(side=8), torch.rand(4, 1, 8, 8)
    assert not torch.allclose(
        judge(x)[:2], judge(x[:2]), atol=1e-4
    )  # in training mode, norms use the statistics of the batch
    judge.eval()
    torch.testing.assert_close(judge(x)[2:3], judge(x[2:3]))


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 8, 8), (1, 8, 12)], ids=str)
def test_images_of_another_shape_are_refused(shape):
    with pytest.raises(ShapeError, match=r"of shape \(1, 8, 8\), got \(" + ", ".join(map(str, shape))):
        LeNet(side=8)(torch.zeros(2, *shape))
