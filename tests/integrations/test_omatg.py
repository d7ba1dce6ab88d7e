"""The adapter of OMatG: the same samples as its own integration, its interpolants, and the variance of each crystal.

Every test that needs a model runs with the stand-in, and with OMatG itself where it is installed (omatg_models.py).
"""

import math
import warnings
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import yaml

import fmwc
from fmwc.crystals.structures import Crystals
from fmwc.errors import CheckpointError, FmwcError
from fmwc.estimators import Linearised
from fmwc.flow import CellVectors, Space, path_of
from fmwc.integrations.omatg import UNUSED, Batch, OMatG, _fill, as_crystals, load, states
from fmwc.randomness import Stream
from fmwc.sampling import SamplingConfig, noise
from tests.conftest import awaken
from tests.integrations.omatg_models import MODELS, StandIn, made
from tests.reference import jacobian_var

ATOMS = torch.tensor([3, 1, 4, 2])
WIDTH = 5


def cond(atoms=ATOMS, seed=0):
    types = torch.randint(1, 90, (len(atoms), WIDTH), generator=torch.Generator().manual_seed(seed))
    return {"atoms": atoms, "types": types * (torch.arange(WIDTH) < atoms[:, None])}


def adapted(name="stand-in", **options):
    return OMatG(made(name), width=WIDTH, **options)


def start(net, given=None, seed=0):
    given = given or cond()
    x0 = noise(net.space, len(given["atoms"]), seed, cond=given)
    return {name: value.double() for name, value in x0.items()}


def batch_of(x, given):
    """Return a padded state as OMatG's batch, with a loop."""
    atoms = given["atoms"].tolist()
    rows = [(b, i) for b, count in enumerate(atoms) for i in range(count)]
    species = torch.stack([given["types"][row] for row in rows])
    pos = torch.stack([x["coord"][row] for row in rows])
    owner = torch.tensor([b for b, _ in rows])
    ptr = torch.tensor([sum(atoms[:b]) for b in range(len(atoms) + 1)])
    return Batch(species, pos, x["lattice"].clone(), given["atoms"], owner, ptr)


def padded(pos, given):
    full, index = torch.zeros(len(given["atoms"]), WIDTH, 3, dtype=pos.dtype), 0
    for b, count in enumerate(given["atoms"].tolist()):
        full[b, :count] = pos[index : index + count]
        index += count
    return full


@torch.no_grad()
def integrated(model, x0, given, steps, annealing):
    """Euler steps from 0.001 to 0.999 with OMatG's annealing, written out."""
    now, times = batch_of(x0, given), torch.linspace(1e-3, 1 - 1e-3, steps + 1)
    for t, after in pairwise(times):
        v = model(now, t.repeat(len(given["atoms"])).double())
        pos = (now.pos + (after - t) * (1 + annealing[0] * t) * v.pos_b).remainder(1.0)
        cell = now.cell + (after - t) * (1 + annealing[1] * t) * v.cell_b
        now = Batch(now.species, pos, cell, now.n_atoms, now.batch, now.ptr)
    return now.pos, now.cell


def interpolants(steps, annealing, kinds=("PeriodicLinear", "Linear"), centred=False):
    """Return OMatG's own collection of interpolants."""
    si = pytest.importorskip("omg.si.single_stochastic_interpolant", reason="OMatG is not installed")
    from omg.si import interpolants
    from omg.si.single_stochastic_interpolant_identity import SingleStochasticInterpolantIdentity
    from omg.si.stochastic_interpolants import StochasticInterpolants

    def single(kind, factor, centred=False):
        return si.SingleStochasticInterpolant(
            getattr(interpolants, f"{kind}Interpolant")(), None, None, "ODE", {"method": "euler"}, centred, factor
        )

    parts = [
        SingleStochasticInterpolantIdentity(),
        single(kinds[0], annealing[0], centred),
        single(kinds[1], annealing[1]),
    ]
    return StochasticInterpolants(parts, ["species", "pos", "cell"], steps + 1, enable_progress_bar=False)


def as_data(x, given):
    from torch_geometric.data import Data

    return Data(**vars(batch_of(x, given)))


def distance(a, b):  # of fractional coordinates
    return float((a - b - (a - b).round()).abs().max())


# ---- samples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("annealing", [(0.0, 0.0), (10.2, 1.8)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_samples_equal_an_integration_with_their_steps(name, annealing):
    net, given, steps = adapted(name, annealing=annealing), cond(), 12
    field = fmwc.attach(net, space=net.space, exclude=UNUSED if name == "OMatG" else "*_out_2")
    x0 = start(net)
    run = fmwc.sample(field, x0=x0, steps=steps, cond=given, confidence=Linearised())
    pos, cell = integrated(net.network, x0, given, steps, annealing)
    assert distance(run.x["coord"], padded(pos, given)) < 1e-6
    torch.testing.assert_close(run.x["lattice"], cell, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(run.x["lattice"], x0["lattice"], atol=0.1)
    plain = fmwc.sample(net, x0=x0, steps=steps, cond=given, confidence=None, config=SamplingConfig(space=net.space))
    assert all(torch.equal(run.x[channel], plain.x[channel]) for channel in run.x)


@pytest.mark.parametrize("kinds", [("PeriodicLinear", "Linear"), ("PeriodicTrigonometric", "Trigonometric")])
def test_samples_equal_those_of_omatg(kinds):
    net, given, steps, annealing = adapted("OMatG", annealing=(10.2, 1.8)), cond(), 12, (10.2, 1.8)
    field, x0 = fmwc.attach(net, space=net.space, exclude=UNUSED), start(net)
    run = fmwc.sample(field, x0=x0, steps=steps, cond=given)
    theirs = interpolants(steps, annealing, kinds).integrate(as_data(x0, given), net.network)
    assert distance(run.x["coord"], padded(theirs.pos, given)) < 1e-6
    torch.testing.assert_close(run.x["lattice"], theirs.cell, rtol=1e-6, atol=1e-6)


# ---- paths -----------------------------------------------------------------------------------------------------------

KINDS = {"linear": ("PeriodicLinear", "Linear"), "cosine": ("PeriodicTrigonometric", "Trigonometric")}


def ends(net, given):
    x0, x1 = start(net, given, 1), start(net, given, 2)
    return x0, x1, torch.tensor([0.1, 0.4, 0.7, 0.95], dtype=torch.float64)


@pytest.mark.parametrize("schedule", KINDS)
def test_velocity_is_the_derivative_of_the_path_between_the_nearest_images(schedule):
    net, given = adapted(coord=schedule, lattice=schedule), cond()
    x0, x1, t = ends(net, given)
    path = path_of(fmwc.attach(net, space=net.space), net.space.given(given))
    x_t, u = path(x0, x1, t)
    ahead, _ = path(x0, x1, t + 1e-6)
    slope = ahead["coord"] - x_t["coord"]
    torch.testing.assert_close((slope - slope.round()) / 1e-6, u["coord"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close((ahead["lattice"] - x_t["lattice"]) / 1e-6, u["lattice"], rtol=1e-4, atol=1e-4)
    first, last = (path(x0, x1, torch.full_like(t, end))[0] for end in (0.0, 1.0))
    assert distance(first["coord"], x0["coord"]) < 3e-3
    assert distance(last["coord"], x1["coord"]) < 3e-3
    if schedule == "linear":  # half a period at most
        assert float(u["coord"].abs().max()) <= 0.5


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("schedule", KINDS)
def test_paths_and_losses_equal_those_of_omatg(schedule, centred):
    net, given = adapted("OMatG", coord=schedule, lattice=schedule, centred=centred, costs=(0.9, 0.1)), cond()
    x0, x1, t = ends(net, given)
    collection, time = interpolants(4, (0.0, 0.0), KINDS[schedule], centred), 1e-3 + 0.998 * t
    theirs, _ = collection._interpolate(time, as_data(x0, given), as_data(x1, given))
    x_t, u = net.path(x0, x1, t)
    assert distance(x_t["coord"], padded(theirs.pos, given)) < 1e-12
    torch.testing.assert_close(x_t["lattice"], theirs.cell)
    losses = collection.losses(net.network, time, as_data(x0, given), as_data(x1, given))
    space, v = net.space.given(given), net(x_t, t, **given)
    ours, still = space.squared_error(v, u), space.squared_error({n: 0 * c for n, c in u.items()}, u)
    expected = 0.9 * losses["pos_loss_b"] + 0.1 * losses["cell_loss_b"]  # without the constant E‖u‖²
    torch.testing.assert_close((ours - still) / 0.998**2, expected, rtol=1e-6, atol=1e-9)


def test_a_centred_path_has_no_common_motion():
    net, given = adapted(centred=True), cond()
    x0, x1, t = ends(net, given)
    moving = net.path(x0, x1, t)[1]["coord"]
    assert float(moving.sum(1).abs().max()) < 1e-12
    assert not moving[torch.arange(WIDTH) >= ATOMS[:, None]].any()


# ---- variance --------------------------------------------------------------------------------------------------------


def flat(v):
    return torch.cat([v["coord"].flatten(1), v["lattice"].flatten(1)], 1)


@pytest.fixture(params=MODELS)
def field(request):
    net = adapted(request.param)
    exclude = UNUSED if request.param == "OMatG" else "*_out_2"
    return awaken(fmwc.attach(net, space=net.space, exclude=exclude, width=8, initial_log_alpha=-6.0)).double()


@pytest.mark.parametrize("sizes", [(3, 1, 4), (1, 1), (1,), (2, 2)], ids=str)
def test_variance_equals_the_whole_jacobian_and_reaches_every_layer(field, sizes):
    given = cond(torch.tensor(sizes))
    x, t = start(field.network, given), torch.linspace(0.2, 0.8, len(sizes), dtype=torch.float64)
    var, calls = jacobian_var(lambda probe: flat(field.run(probe, x, t, cond=given)))
    found = field.moments(x, t, Linearised(), cond=given)
    torch.testing.assert_close(flat(found.var), var, rtol=1e-8, atol=1e-14)
    assert len(calls) == len(field.noise.names)
    assert bool((calls > 0).all())


def test_variance_of_a_crystal_does_not_depend_on_its_batch(field):
    given = cond()
    x, t = start(field.network), torch.tensor([0.2, 0.4, 0.6, 0.8], dtype=torch.float64)
    whole = field.moments(x, t, Linearised(), cond=given).var
    for i in range(len(ATOMS)):
        row = slice(i, i + 1)
        one = {name: value[row] for name, value in x.items()}
        single = field.moments(one, t[row], Linearised(), cond={n: v[row] for n, v in given.items()}).var
        for channel in x:
            torch.testing.assert_close(whole[channel][row], single[channel], rtol=1e-8, atol=1e-16)
    assert not whole["coord"][torch.arange(WIDTH) >= ATOMS[:, None]].any()


def test_confidence_after_fitting_and_loading(tmp_path):
    """Labels call samples failures where the variance at the end is large: a score of the variance is chosen."""
    options = {"width": WIDTH, "annealing": (2.0, 1.0), "centred": True}
    net = OMatG(made("stand-in").float(), **options)
    given = cond(torch.tensor([1, 2, 3, 4] * 40))
    x1 = {name: value.float() for name, value in start(net, given, 3).items()}
    field = fmwc.attach(net, space=net.space, exclude="*_out_2")
    fmwc.fit_noise(field, x1, steps=4, batch=32, cond=given, confidence=False)

    def labels(x, cond):
        total = flat(field.moments(x, 1.0, Linearised(), cond=cond).var).sum(1)
        return total > total.quantile(0.7)

    fmwc.fit_confidence(field, cond=given, steps=6, pilot=160, labels=labels)
    few = {name: value[:8] for name, value in given.items()}
    run = fmwc.sample(field, 8, steps=6, cond=few)
    assert len(run.times)  # the variance was read
    assert bool(((run.confidence >= 0) & (run.confidence <= 1)).all())
    assert run.confidence.unique().numel() > 4
    fmwc.save(field, tmp_path / "field")
    again = fmwc.load(tmp_path / "field", network=OMatG(StandIn(), **options))
    assert isinstance(again.space.channels["lattice"].manifold, CellVectors)
    assert torch.equal(fmwc.sample(again, 8, steps=6, cond=few).confidence, run.confidence)


# ---- noise and structures --------------------------------------------------------------------------------------------


def test_cells_at_the_start_have_the_lengths_and_angles_of_omatg():
    ase = pytest.importorskip("ase.geometry.cell")
    manifold = CellVectors((1.5, 1.7, 2.0), (0.2, 0.3, 0.4))
    cell = manifold.noise(Stream(torch.Generator().manual_seed(0)), torch.empty(20_000, 3, 3, dtype=torch.float64))
    crystals = as_crystals(
        SimpleNamespace(x={"lattice": cell, "coord": cell}, cond={"types": cell}, names=[""] * 20_000)
    )
    logs = crystals.lengths.log()
    torch.testing.assert_close(logs.mean(0), torch.tensor([1.5, 1.7, 2.0]).double(), atol=0.02, rtol=0)
    torch.testing.assert_close(logs.std(0), torch.tensor([0.2, 0.3, 0.4]).double(), atol=0.01, rtol=0)
    assert 60 <= float(crystals.angles.min()) < 60.1
    assert 119.9 < float(crystals.angles.max()) <= 120
    torch.testing.assert_close(crystals.angles.mean(0), torch.full((3,), 90.0).double(), atol=0.5, rtol=0)
    for i in range(20):
        expected = ase.cellpar_to_cell([*crystals.lengths[i].tolist(), *crystals.angles[i].tolist()])
        torch.testing.assert_close(cell[i], torch.as_tensor(expected), atol=1e-9, rtol=1e-9)
    space = Space.from_description(Space({"lattice": fmwc.flow.Channel((3, 3), manifold, "own")}).describe())
    assert space.channels["lattice"].manifold == manifold


def few():
    numbers = torch.tensor([[11, 17, 0], [22, 8, 8]])
    coords = torch.tensor(
        [[[0.0, 0, 0], [0.5, 0.5, 0.5], [0, 0, 0]], [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]]]
    )
    lengths, angles = torch.tensor([[3.9, 3.9, 3.9], [4.0, 5.0, 6.0]]), torch.tensor([[60.0, 60, 60], [80, 95, 110]])
    return Crystals(numbers, coords, lengths, angles, ("salt", "oxide"))


def test_structures_survive_as_states_in_the_orientation_of_cif_files():
    pymatgen = pytest.importorskip("pymatgen.core")
    x1, given = states(few(), width=WIDTH)
    assert given["atoms"].tolist() == [2, 3]
    for i, (lengths, angles) in enumerate(zip(few().lengths, few().angles, strict=True)):
        matrix = pymatgen.Lattice.from_parameters(*lengths.tolist(), *angles.tolist()).matrix.copy()
        torch.testing.assert_close(x1["lattice"][i].double(), torch.from_numpy(matrix), atol=1e-5, rtol=1e-5)
    back = as_crystals(SimpleNamespace(x=x1, cond=given, names=["salt", "oxide"]))
    torch.testing.assert_close(back.lengths, few().lengths)
    torch.testing.assert_close(back.angles, few().angles)
    assert torch.equal(back.numbers[:, :3], few().numbers)
    torch.testing.assert_close(back.coords[:, :3], few().coords)
    structures = [
        pymatgen.Structure(matrix.double().numpy(), z[z > 0].tolist(), f[z > 0].numpy())
        for matrix, z, f in zip(x1["lattice"].roll(1, -1), few().numbers, few().coords, strict=True)
    ]
    again, _ = states(structures, width=WIDTH)  # turned to the same orientation
    torch.testing.assert_close(again["lattice"], x1["lattice"], atol=1e-5, rtol=1e-5)


# ---- files -----------------------------------------------------------------------------------------------------------


def named(path, **arguments):
    return {"class_path": f"omg.{path}", "init_args": arguments}


def configuration():
    """The layout of OMatG's csp_linear_ode_mp_20.yaml, with a small encoder."""

    def single(kind, **arguments):
        common = {"gamma": None, "epsilon": None, "differential_equation_type": "ODE"}
        solver = {"integrator_kwargs": {"method": "euler"}}
        interpolant = f"omg.si.interpolants.{kind}"
        return named(
            "si.single_stochastic_interpolant.SingleStochasticInterpolant",
            interpolant=interpolant,
            **common,
            **solver,
            **arguments,
        )

    parts = [
        {"class_path": "omg.si.single_stochastic_interpolant_identity.SingleStochasticInterpolantIdentity"},
        single("PeriodicLinearInterpolant", velocity_annealing_factor=10.0, correct_center_of_mass_motion=True),
        single("TrigonometricInterpolant", velocity_annealing_factor=1.5),
    ]
    cells = named("sampler.cell_distributions.InformedLatticeDistribution", dataset_name="mp_20")
    return {
        "model": {
            "si": named(
                "si.stochastic_interpolants.StochasticInterpolants",
                stochastic_interpolants=parts,
                data_fields=["species", "pos", "cell"],
                integration_time_steps=21,
            ),
            "relative_si_costs": {"species_loss": 0.0, "pos_loss_b": 0.75, "cell_loss_b": 0.25},
            "sampler": named(
                "sampler.IndependentSampler",
                pos_distribution={"class_path": "omg.sampler.position_distributions.UniformPositionDistribution"},
                cell_distribution=cells,
                species_distribution={"class_path": "omg.sampler.species_distributions.MirrorSpecies"},
            ),
            "model": named(
                "model.model.Model",
                encoder=named(
                    "model.encoders.cspnet_full.CSPNetFull", hidden_dim=16, latent_dim=8, num_layers=4, num_freqs=3
                ),
                head={"class_path": "omg.model.heads.pass_through.PassThrough"},
                time_embedder=named("model.model_utils.SinusoidalTimeEmbeddings", dim=8),
            ),
            "use_min_perm_dist": False,
        },
        "data": {"batch_size": 4},
    }


def write(folder, content):
    path = folder / "config.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def changed(*keys, to):
    content = configuration()
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    if to is KeyError:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = to
    return content


SI = ("model", "si", "init_args")
POS = (*SI, "stochastic_interpolants", 1, "init_args")
MASKS = "omg.si.discrete_flow_matching_mask.DiscreteFlowMatchingMask"
REFUSED = {
    "de novo": (changed(*SI, "stochastic_interpolants", 0, "class_path", to=MASKS), "species"),
    "another integrator": (changed(*POS, "integrator_kwargs", to={"method": "dopri5"}), "Euler"),
    "another package": (changed("model", "model", "class_path", to="os.system"), "not one of omg"),
    "no YAML": ("{", "config.yaml"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_configurations_are_refused_in_one_line(name, tmp_path):
    content, told = REFUSED[name]
    with pytest.raises(FmwcError, match=told) as caught:
        load(write(tmp_path, content))
    assert "config.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def lightning_checkpoint(model, folder, **options):
    """Train one step with Lightning, as OMatG's command does, and save a checkpoint."""
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch):
            return sum(p.square().sum() for p in self.model.parameters())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    saver = lightning.callbacks.ModelCheckpoint(dirpath=folder, every_n_train_steps=1)
    trainer = lightning.Trainer(
        max_steps=1, logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        default_root_dir=folder, callbacks=[saver],
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Module(), torch.utils.data.DataLoader([torch.zeros(1)]))
    return saver.best_model_path or saver.last_model_path


def test_a_checkpoint_of_omatg_is_loaded(tmp_path):
    model = made("OMatG").float()
    path = lightning_checkpoint(model, tmp_path)
    net = load(write(tmp_path, configuration()), path, width=WIDTH)
    weights = net.network.state_dict()
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert (net.steps, net.centred, net.annealing) == (20, True, {"coord": 10.0, "lattice": 1.5})
    assert [c.weight for c in net.space.channels.values()] == [0.75, 0.25]
    assert net.space.channels["lattice"].manifold.mean == pytest.approx((1.5754, 1.7017, 1.9782), abs=1e-4)
    t = torch.tensor([0.0, 1.0])
    sine = math.sin(math.pi / 2 * 0.999)
    assert float(net.schedules["lattice"](1e-3 + 0.998 * t)[0][1]) == pytest.approx(sine)
    field = fmwc.attach(net, space=net.space, exclude=UNUSED)
    assert fmwc.sample(field, 4, steps=net.steps, cond=cond()).rank.shape == (4,)


def test_the_example_configuration_of_omatg_is_read():
    omg = pytest.importorskip("omg", reason="OMatG is not installed")
    from pathlib import Path

    net = load(Path(omg.__file__).parent / "conf_examples" / "csp_linear_ode_mp_20.yaml")
    assert net.steps == 209
    assert net.annealing["coord"] == pytest.approx(10.182659)
    assert sum(p.numel() for p in net.parameters()) > 10**7


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"state_dict": {"model.other": torch.zeros(1)}}, "fit"),
    ],
)
def test_other_checkpoints_are_refused_in_one_line(content, told, tmp_path):
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=told) as caught:
        _fill(StandIn(), tmp_path / "a.ckpt")
    assert "\n" not in str(caught.value)
