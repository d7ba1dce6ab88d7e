"""Networks in plain torch: velocity networks for vectors, images and crystals, and an image classifier."""

from fmwc.networks.cspnet import CSPNet
from fmwc.networks.lenet import LeNet
from fmwc.networks.mlp import MLP, TimeEmbedding
from fmwc.networks.unet import UNet

__all__ = ["MLP", "CSPNet", "LeNet", "TimeEmbedding", "UNet"]
