"""Networks in plain torch: backbones of a velocity, and the judge of images. They know nothing of confidence."""

from fmwc.nets.cspnet import CSPNet
from fmwc.nets.lenet import LeNet
from fmwc.nets.mlp import MLP
from fmwc.nets.unet import UNet

__all__ = ["MLP", "NETS", "CSPNet", "LeNet", "UNet"]

NETS = {"CSPNet": CSPNet, "LeNet": LeNet, "MLP": MLP, "UNet": UNet}  # by the name a checkpoint records
