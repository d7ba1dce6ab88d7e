"""A compiled field: the field's samples and variances, and updates of its weights."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

import fmwc
from fmwc import compiled as compiling
from fmwc.compiled import Compiled
from fmwc.errors import UsageError
from fmwc.estimators import Diagonal, Linearised, MonteCarlo, Tangent
from fmwc.flow import Channel, FlatTorus, Space
from fmwc.networks import MLP, CSPNet, UNet
from fmwc.sampling import SamplingConfig, Schedule
from fmwc.state import channels
from tests.options import arguments, reader

ESTIMATORS = {
    "exact": Linearised(),
    "probed": Linearised(2),
    "tangent": Tangent(),
    "diagonal": Diagonal(),
    "taylor": Diagonal("taylor1"),
    "draws": MonteCarlo(2),
}
WIDTH = 4


def points():
    return fmwc.attach(MLP(2, 8, 2), space=(2,)), {}


def digits():
    return fmwc.attach(UNet(1, 8, (1, 2), 1, 8, 3), space=(1, 8, 8)), {"y": torch.arange(3).repeat(2)}


def crystals():
    space = Space(
        {
            "type": Channel((WIDTH, 7), rows="atoms"),
            "coord": Channel((WIDTH, 3), FlatTorus(), "uniform", rows="atoms", centred=True),
            "lattice": Channel((6,)),
        }
    )
    return fmwc.attach(CSPNet(8, 1, 2, 4, width=WIDTH), space=space), {"atoms": torch.tensor([2, 1, 3, 4, 2, 3])}


def fast(field, backend="eager"):
    said = []
    return Compiled(field, backend, said.append, half=False), said


def assert_same(one, other, **tolerance):
    for name in ("x", "mean", "var"):
        for channel, value in channels(getattr(one, name)).items():
            torch.testing.assert_close(value, channels(getattr(other, name))[channel], **tolerance)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# Estimators that draw noise per row also draw it for spare rows, which changes the noise of others: not for crystals.
SAME = [(made, name) for made in (points, digits) for name in ("probed", "tangent", "diagonal", "taylor", "draws")]


@pytest.mark.parametrize(
    ("made", "estimator"), [*SAME, (points, "exact"), *[(crystals, n) for n in ("probed", "taylor")]]
)
def test_compiled_samples_and_variances_agree(made, estimator):
    field, cond = made()
    options = {"steps": 3, "confidence": ESTIMATORS[estimator], "schedule": Schedule.every(2), "cond": cond}
    compiled, said = fast(field)
    assert_same(
        fmwc.sample(compiled, 6, **arguments(**options)),
        fmwc.sample(field, 6, **arguments(**options)),
        rtol=1e-4,
        atol=1e-6,
    )
    assert len(said) == 4  # one message before and one after compiling the velocity, and the reading


@pytest.mark.parametrize("made", [points, digits])
def test_backends_agree_up_to_rounding(made):
    field, cond = made()
    compiled, _ = fast(field, "aot_eager")
    options = {"steps": 3, "confidence": ESTIMATORS["probed"], "cond": cond}
    one, other = (fmwc.sample(f, 6, **arguments(**options)) for f in (compiled, field))
    assert_same(one, other, rtol=1e-4, atol=1e-6)


class Convolving(nn.Module):
    """A network of convolutions of every kind."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, stride=2, padding=1),  # 7 rows, so the last is not used
            nn.Conv2d(4, 6, (1, 3), padding="same", groups=2),
            nn.Conv2d(6, 4, 3, padding=2, dilation=2),
            nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1),
            nn.Conv2d(4, 1, 1),
        )
        self.thin = nn.Conv1d(7, 7, 3, stride=2, padding=1)

    def forward(self, x, t):
        h = self.layers(x)
        return h + self.thin(h[:, 0]).sum(-1)[:, None, None]


def test_backward_convolutions_become_transposed_convolutions(monkeypatch):
    field = fmwc.attach(Convolving(), space=(1, 7, 7))
    seen, rewrite = [], compiling.transpose_backward_convolutions

    def rewritten(graph):
        rewrite(graph)
        seen.append([str(node.target) for node in graph.nodes])

    monkeypatch.setattr(compiling, "transpose_backward_convolutions", rewritten)
    options = {"steps": 2, "confidence": Linearised(2)}
    assert_same(
        fmwc.sample(fast(field)[0], 4, **arguments(**options)),
        fmwc.sample(field, 4, **arguments(**options)),
        rtol=1e-4,
        atol=1e-6,
    )
    assert [targets.count("aten.convolution_backward.default") for targets in seen] == [
        2
    ]  # for the transposed convolution
    assert (
        seen[0].count("aten.convolution.default") == 7 + 7 + 2 * 5
    )  # outputs, variances, and two probes for all but the first


def test_common_terms_of_reading_and_velocity_are_computed_once(monkeypatch):
    field, cond = digits()
    seen, rewrite = [], compiling.remove_duplicates

    def rewritten(module):
        rewrite(module)
        seen.append([str(node.target) for node in module.graph.nodes])

    monkeypatch.setattr(compiling, "remove_duplicates", rewritten)
    fmwc.sample(fast(field)[0], 6, steps=1, confidence=reader(ESTIMATORS["taylor"]), cond=cond)
    layers = sum(isinstance(m, nn.Conv2d) for m in field.network.modules())
    assert [targets.count("aten.convolution.default") for targets in seen] == [2 * layers]  # outputs and variances
    norms = sum(isinstance(m, nn.GroupNorm) for m in field.network.modules())
    assert seen[0].count("aten.native_group_norm.default") == norms


class Writing(nn.Module):
    """A network that fills two tables with equal initial values."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x, t):
        one, other = x.new_zeros(x.shape), x.new_zeros(x.shape)
        one[:, 0] = self.first(x)[:, 0]
        other[:, 1] = self.second(x)[:, 1]
        return one + 2 * other + one * other


def test_random_operations_are_not_merged():
    module = make_fx(lambda x: torch.randn_like(x) - torch.randn_like(x))(torch.zeros(4))
    compiling.remove_duplicates(module)
    assert module(torch.zeros(4)).abs().min() > 0


def test_tensors_written_in_place_are_not_merged():
    field = fmwc.attach(Writing(), space=(2,))
    for confidence in (Linearised(2), MonteCarlo(2)):
        options = {"steps": 2, "confidence": confidence}
        assert_same(
            fmwc.sample(fast(field)[0], 4, **arguments(**options)),
            fmwc.sample(field, 4, **arguments(**options)),
            rtol=1e-4,
            atol=1e-6,
        )


def test_each_batch_size_is_compiled_once():
    field, _ = points()
    compiled, said = fast(field)
    run = fmwc.sample(compiled, 10, steps=2, config=SamplingConfig(batch=4))
    sizes = [text.split(" of ")[-1] for text in said if text.startswith("compiling")]
    assert sizes == ["4 …", "2 …"]
    said.clear()
    again = fmwc.sample(compiled, 10, steps=2, config=SamplingConfig(batch=4))
    assert not said
    assert_same(run, again, rtol=0, atol=0)
    assert_same(run, fmwc.sample(field, 10, steps=2, config=SamplingConfig(batch=4)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.weight.mul_(1.5),
        lambda layer: layer.weight.data.mul_(1.5),  # has no effect except the values
        lambda layer: setattr(layer.weight, "data", layer.weight * 1.5),
        lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight * 1.5)),
    ],
    ids=["in place", "behind autograd's back", "moved", "replaced"],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_weights_may_change_between_runs(change, compiled):
    field, _ = points()
    subject = fast(field)[0] if compiled else field
    before = fmwc.sample(subject, 4, steps=2)
    with torch.no_grad():
        change(next(m for m in field.network.modules() if isinstance(m, nn.Linear)))
    after = fmwc.sample(subject, 4, steps=2)
    fresh = fmwc.attach(field.network, space=(2,))
    fresh.noise.load_state_dict(field.noise.state_dict())
    assert_same(after, fmwc.sample(fresh, 4, steps=2), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(before.var, after.var)


def test_larger_crystals_get_more_capacity():
    field, _ = crystals()
    compiled, said = fast(field)
    for atoms in ([1, 1, 1], [4, 4, 4], [1, 2, 1]):
        cond = {"atoms": torch.tensor(atoms)}
        options = {"steps": 2, "confidence": Linearised(1), "cond": cond}
        assert_same(
            fmwc.sample(compiled, 3, **arguments(**options)),
            fmwc.sample(field, 3, **arguments(**options)),
            rtol=1e-4,
            atol=1e-6,
        )
    assert len(said) == 2 * 2  # for both capacities; small crystals fit into the larger one


def test_a_network_in_training_mode_is_sampled_in_evaluation_mode():
    net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    net.forward = lambda x, t: nn.Sequential.forward(net, x)
    field = fmwc.attach(net, space=(2,)).train()
    assert_same(fmwc.sample(fast(field)[0], 4, steps=2), fmwc.sample(field, 4, steps=2), rtol=1e-5, atol=1e-6)
    assert net.training


def test_transport_and_other_decoders_run_uncompiled():
    field, _ = points()
    compiled, _ = fast(field)
    for options in ({"transport": True}, {"decoder": "stochastic"}):
        one, other = (fmwc.sample(f, 4, **arguments(steps=2, **options)) for f in (compiled, field))
        assert_same(one, other, rtol=1e-4, atol=1e-6)


class Looking(nn.Module):
    """A network that branches on values."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x, t):
        return self.layer(x) if float(x.detach().sum()) > 0 else x


def test_networks_that_branch_on_values_are_refused():
    with pytest.raises(UsageError, match="cannot be compiled"):
        fmwc.sample(fast(fmwc.attach(Looking(), space=(2,)))[0], 4, steps=2)


class Choosing(nn.Module):
    """A network whose shapes depend on values, without a branch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x, t):
        h = self.layer(x)
        chosen = h[h[:, 0] > 0]
        return h + chosen.sum(0) / 4


@pytest.mark.parametrize("confidence", [False, "linearised", "tangent"])
def test_a_network_whose_shapes_depend_on_values_is_refused(confidence):
    with pytest.raises(UsageError, match="cannot be compiled"):
        fmwc.sample(fast(fmwc.attach(Choosing(), space=(2,)))[0], 4, steps=2, confidence=reader(confidence))


def test_each_precision_has_its_own_graph():
    field, _ = points()
    compiled, _ = fast(field)
    with torch.autocast("cpu", torch.bfloat16):
        half = fmwc.sample(compiled, 4, steps=2)
    whole = fmwc.sample(compiled, 4, steps=2)
    assert_same(whole, fmwc.sample(field, 4, steps=2), rtol=1e-5, atol=1e-6)
    assert not torch.equal(half.x, whole.x)


def test_sampling_does_not_change_the_networks_capacity():
    field, cond = crystals()
    fmwc.sample(fast(field)[0], 6, steps=2, confidence=Linearised(1), cond=cond)
    assert field.network.static_capacity == {}


def test_graphs_of_a_smaller_capacity_are_dropped():
    field, _ = crystals()
    compiled, _ = fast(field)
    for size in (1, 2, 3, 4):
        fmwc.sample(compiled, 3, steps=2, confidence=None, cond={"atoms": torch.full((3,), size)})
    assert len(compiled._graphs) == 1


def test_compiled_field_forwards_reference_and_schedule():
    field, _ = points()
    compiled, _ = fast(field)
    compiled.schedule = fmwc.sampling.fit_schedule(compiled, 2, pilot=10, steps=4)
    assert field.schedule is compiled.schedule
    assert fmwc.sample(compiled, 3, steps=4, schedule=Schedule.adaptive()).reference is not None


def test_out_of_memory_is_not_reported_as_uncompilable(monkeypatch):
    def full(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    field, _ = points()
    monkeypatch.setattr(compiling, "make_fx", full)
    with pytest.raises(torch.OutOfMemoryError):
        fmwc.sample(fast(field)[0], 1, steps=2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised when torch imports its compiler
def test_the_compiler_itself_agrees_with_the_field():
    """Test the default backend, which generates C++ here, and Triton on a GPU."""
    field, _ = points()
    compiled, said = fast(field, "inductor")
    assert_same(fmwc.sample(compiled, 8, steps=3), fmwc.sample(field, 8, steps=3), rtol=1e-4, atol=1e-6)
    assert sum(text.startswith("compiled ") for text in said) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_is_cached_on_disk_for_any_weights(tmp_path, monkeypatch):
    """Compiled code is in torch's cache on disk, also for new processes. The cache key does not contain the weights."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for hits in (0, 1):
        counters.clear()
        field, _ = points()
        with torch.no_grad():
            for parameter in field.parameters():
                parameter.mul_(1 + hits)
        one, other = (fmwc.sample(f, 4, steps=2) for f in (fast(field, "inductor")[0], field))
        assert_same(one, other, rtol=1e-4, atol=1e-6)
        assert counters["inductor"]["fxgraph_cache_hit"] == hits
        torch.compiler.reset()


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning"
)  # torch warns that TF32 would be faster
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: what is captured is a CUDA graph")
@pytest.mark.parametrize("made", [points, digits, crystals])
@pytest.mark.parametrize(("half", "tolerance"), [(False, 1e-3), (True, 0.05)])
def test_a_captured_graph_agrees_with_the_field(made, half, tolerance, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # ten bits; fused operations round differently
    field, cond = made()
    field, cond = field.to("cuda"), {k: v.to("cuda") for k, v in cond.items()}
    compiled = Compiled(field, say=lambda text: None, half=half, cuda_graph=True)
    options = {"steps": 3, "confidence": Linearised(1), "cond": cond}
    for seed in (0, 1):
        one, other = (fmwc.sample(f, 6, **arguments(seed=seed, **options)) for f in (compiled, field))
        assert_same(one, other, rtol=tolerance, atol=1e-5)
