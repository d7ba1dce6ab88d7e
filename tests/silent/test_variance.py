"""Silent errors of the variance: issue 30, sections 1 and 4 (rows), and parts of 5 and 6.

A variance that is shown is compared with Monte Carlo over draws, one sample at a time: the draws of a sample that is
alone in its batch cannot be assigned to another sample.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import fmwc
from fmwc.adapters import Guided, Predicting, adapt
from fmwc.errors import UsageError
from fmwc.estimators import ESTIMATORS, MonteCarlo, Tangent
from fmwc.field import attach
from fmwc.flow import path_of, restriction_of, speeds_of
from tests import cells

WIDTH = 6
NOISE = {"initial_log_alpha": -6.0}


def owner(sizes):
    return torch.arange(len(sizes)).repeat_interleave(sizes)


class Atoms(nn.Module):
    """Two layers on a flat list of the atoms of all samples, and one on tokens, of which each sample has two."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.token = nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(2, 2)

    def rows(self, x, t, *, atoms):
        return {"token": 2, "*": owner(atoms)}

    def forward(self, x, t, *, atoms):
        used = torch.arange(WIDTH) < atoms[:, None]
        h = self.last(torch.tanh(self.first(torch.cat([x[used], t[owner(atoms)][:, None]], 1))))
        tokens = self.token(x[:, :2].flatten(0, 1)).unflatten(0, (len(x), 2)).sum(1)
        return torch.zeros_like(x).index_put((used,), h) + tokens[:, None]


class Forgetful(Atoms):
    """Declares the rows of some layers only."""

    def rows(self, x, t, *, atoms):
        return {"first": owner(atoms), "token": 2}


class Counted(Atoms):
    """Declares kinds of rows, without the layers that see them."""

    def rows(self, x, t, *, atoms):
        return [owner(atoms)]


class Silent(Atoms):
    rows = None


class Wrapper(nn.Module):
    """A plain module around a network."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, t, **cond):
        return self.net(x, t, **cond)


class Passing(Wrapper):
    def rows(self, x, t, **cond):
        return {f"net.{pattern}": rows for pattern, rows in self.net.rows(x, t, **cond).items()}


def batch(*sizes, width=2):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(sizes), WIDTH, width, generator=generator) * (1 + 2 * torch.arange(len(sizes)))[:, None, None]
    return x, torch.linspace(0.1, 0.9, len(sizes)), {"atoms": torch.tensor(sizes)}


def alone(field, x, t, cond, draws=1500):
    """Return the variance of each sample by Monte Carlo over draws of that sample alone."""
    cond = cond or {}
    rows = [slice(i, i + 1) for i in range(len(x))]
    found = [
        field.moments(x[i], t[i], MonteCarlo(draws, draws), seed=0, cond={k: v[i] for k, v in cond.items()}).var
        for i in rows
    ]
    return torch.cat([var.flatten(1).sum(1) for var in found])


def assert_as_drawn(field, x, t, cond=None, estimators=("linearised", "monte_carlo")):
    expected = alone(field, x, t, cond)
    many = {"monte_carlo": MonteCarlo(1500, 10), "tangent": Tangent(1500)}
    for name in estimators:
        estimator = many.get(name, name)
        found = field.moments(x, t, estimator, seed=0, cond=cond).var.flatten(1).sum(1)
        torch.testing.assert_close(found, expected, rtol=0.15, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def every_use(field, x, t, cond):
    """Yield every way to evaluate a field with noise."""
    for name in ESTIMATORS:
        yield name, lambda name=name: field.moments(x, t, name, seed=0, cond=cond)
    yield "draw", lambda: field.draw(x, t, seed=0, cond=cond)
    yield "sample", lambda: fmwc.sample(field, x0=x, steps=1, cond=cond, confidence=ESTIMATORS["linearised"])
    yield "fit", lambda: fmwc.fit_noise(field, x, steps=1, batch=len(x), cond=cond, conventions=False)


def assert_refused(build, x, t, cond, names, before=()):
    for name, use in every_use(field := build(), x, t, cond):
        for given in before:
            field.moments(*given[:2], seed=0, cond=given[2])
        if name in names:
            with pytest.raises(UsageError, match="rows"):
                use()


USES = (*ESTIMATORS, "draw", "sample", "fit")

# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(1, 3), (3, 1), (2, 2), (1, 1), (4, 4, 4, 4), (5, 3, 6, 2)], ids=str)
def test_rows_belong_to_the_samples_that_the_network_declares(sizes):
    """With sizes 1 and 3, the two tokens of each sample are as many rows as the atoms."""
    field = attach(Atoms(), space=(WIDTH, 2), **NOISE)
    field.moments(*batch(2, 1)[:2], cond=batch(2, 1)[2])  # an earlier batch must not decide
    x, t, cond = batch(*sizes)
    assert_as_drawn(field, x, t, cond)
    assert_as_drawn(attach(Passing(Atoms()), space=(WIDTH, 2), **NOISE), x, t, cond, ["linearised"])


@pytest.mark.parametrize("kind", [Forgetful, Counted])
def test_a_network_that_does_not_say_which_layers_see_its_rows_is_refused(kind):
    assert_refused(lambda: attach(kind(), space=(WIDTH, 2)), *batch(4, 4, 4, 4), names=USES)


@pytest.mark.parametrize("sizes", [(5, 3, 6, 2), (4, 3, 4, 5), (3, 5, 4, 4)], ids=str)
def test_rows_that_were_in_order_in_an_earlier_batch_are_checked_again(sizes):
    """Sizes of 4 are in order without a declaration; other sizes with the same sum are not."""
    field, equal = attach(Silent(), space=(WIDTH, 2), exclude="token", **NOISE), batch(4, 4, 4, 4)
    assert_as_drawn(field, *equal)
    x, t, cond = batch(*sizes)
    for name, use in every_use(field, x, t, cond):
        field.moments(*equal[:2], cond=equal[2])
        with pytest.raises(UsageError, match="rows"):
            use()
        assert name
    assert_as_drawn(field, *equal)


def test_a_declaration_of_the_wrong_number_names_the_layer():
    net = Atoms()
    net.rows = lambda x, t, *, atoms: {"token": 1, "*": owner(atoms)}
    with pytest.raises(UsageError, match="'token'"):
        attach(net).moments(*batch(2, 4)[:2], cond=batch(2, 4)[2])


def test_a_declaration_in_the_wrong_order_is_refused():
    net = Atoms()
    net.rows = lambda x, t, *, atoms: {"token": 2, "*": owner(atoms).flip(0)}
    with pytest.raises(UsageError, match="rows"):
        attach(net).moments(*batch(2, 4)[:2], cond=batch(2, 4)[2])


class SequenceFirst(nn.Module):
    """Tokens first in every layer; as many rows as samples if their numbers are equal."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 8), nn.Linear(8, 2)

    def forward(self, x, t):
        return self.last(torch.relu(self.first(x.transpose(0, 1)))).transpose(0, 1)


class TokensFirst(SequenceFirst):
    """A flat list of rows: the first tokens of all samples, then the second."""

    def forward(self, x, t):
        h = self.last(torch.relu(self.first(x.transpose(0, 1).flatten(0, 1))))
        return h.unflatten(0, (x.shape[1], -1)).transpose(0, 1)


class Places(SequenceFirst):
    """A layer on positions, which all samples share; as many rows as samples if their numbers are equal."""

    def forward(self, x, t):
        return x + self.last(torch.relu(self.first(torch.eye(WIDTH)[:, :2])))


class Normed(SequenceFirst):
    """A batch norm without running statistics: samples interact."""

    def forward(self, x, t):
        h = torch.nn.functional.batch_norm(self.first(x[:, 0]), None, None, training=True)
        return x + self.last(h)[:, None]


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "zero at first"])
@pytest.mark.parametrize("count", [2, 3, WIDTH])
@pytest.mark.parametrize("kind", [SequenceFirst, TokensFirst, Places, Normed])
def test_layouts_that_mix_samples_are_refused_by_every_estimator(kind, count, trained):
    torch.manual_seed(0)
    x, t = torch.randn(count, WIDTH, 2), torch.rand(count)

    def build():
        net = kind()
        if not trained:
            nn.init.zeros_(net.last.weight)  # as in many networks, before joint training
        return attach(net, space=(WIDTH, 2))

    assert_refused(build, x, t, None, names=USES)


class Tokens(SequenceFirst):
    """A flat list of rows in the order of the samples."""

    def forward(self, x, t, y=None):
        h = torch.relu(self.first(x.flatten(0, 1)))
        return self.last(h).unflatten(0, x.shape[:2]) + (0 if y is None else y[:, None, None])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_rows_in_order_need_no_declaration(estimator):
    x, t, _ = batch(1, 1, 1, 1, 1)
    assert_as_drawn(attach(Tokens(), space=(WIDTH, 2), **NOISE), x, t, None, [estimator])


class Reversed(nn.Module):
    """Computes the samples in the opposite order, in which the first and the third of three have the same parity."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x, t):
        return self.layer(x.flip(0)).flip(0)


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_samples_in_another_order_are_refused(count):
    field = attach(Reversed(), space=(2,))
    with pytest.raises(UsageError, match="order"):
        field.moments(torch.randn(count, 2), 0.5)


class Masked(nn.Module):
    """Selects rows by a condition: a mask of numbers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x, t, mask):
        return torch.zeros_like(x).masked_scatter(mask[..., None] > 0, self.layer(x[mask > 0]))


def test_a_mask_of_numbers_is_checked_again():
    field, x = attach(Masked(), space=(6, 2)), torch.randn(4, 6, 2)
    masks = [(torch.arange(6) < torch.tensor(sizes)[:, None]).float() for sizes in ([4, 4, 4, 4], [5, 3, 6, 2])]
    field.moments(x, 0.5, cond={"mask": masks[0]})
    with pytest.raises(UsageError):
        field.moments(x, 0.5, cond={"mask": masks[1]})


def test_one_proof_serves_many_batches():
    """Rows are proven once for inputs of one shape, and for new integer conditions if samples have several rows."""
    net, calls = Tokens(), []
    net.register_forward_pre_hook(lambda *_: calls.append(1))
    field, (x, t, _) = attach(net, space=(WIDTH, 2)), batch(1, 1, 1)
    for y, evaluations in (([0, 1, 2], 5), ([0, 1, 2], 1), ([2, 1, 0], 4)):
        calls.clear()
        field.moments(x, t, cond={"y": torch.tensor(y)})
        assert len(calls) == evaluations


# ---- what wrappers pass on -------------------------------------------------------------------------------------------


class Noising(Atoms):
    """Predicts the noise, with everything that a network can declare."""

    def restriction(self, *, atoms):
        return lambda x1, t: x1.clamp(-1, 1)

    def speeds(self, t):
        return {"x": 1 + t}

    def path(self, x0, x1, t):
        return x1, x1


def predicting(net):
    return Predicting(net, "noise", floor=0.2)


WRAPPERS = {
    "adapt": adapt,
    "adapt twice": lambda net: adapt(adapt(net)),
    "backwards": lambda net: adapt(net, backwards=True),
    "predicting": predicting,
    "predicting of adapt": lambda net: predicting(adapt(net)),
    "compiled": lambda net: adapt(torch.compile(net, backend="eager")),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_adapters_pass_rows_on(name):
    x, t, cond = batch(5, 1, 2)
    assert_as_drawn(attach(WRAPPERS[name](Atoms()), space=(WIDTH, 2), **NOISE), x, t, cond)


def test_guided_networks_pass_rows_on():
    class Classes(Atoms):
        def rows(self, x, t, *, atoms, y):
            return super().rows(x, t, atoms=atoms)

        def forward(self, x, t, *, atoms, y):
            return super().forward(x * (1 + y[:, None, None]), t, atoms=atoms)

    x, t, cond = batch(5, 1, 2)
    cond["y"] = torch.tensor([1.0, 2.0, 0.5])
    for guided in (Guided(Classes(), 2.0, y=0.0), adapt(Guided(adapt(Classes()), 2.0, y=0.0))):
        assert_as_drawn(attach(guided, space=(WIDTH, 2), **NOISE), x, t, cond)


@pytest.mark.parametrize("name", ["adapt", "predicting", "guided"])
def test_adapters_pass_the_whole_protocol_on(name):
    net, t = Noising(), torch.tensor([0.5])
    wrapped = Guided(net, 1.0, atoms=0) if name == "guided" else WRAPPERS[name](net)
    for given in (wrapped, attach(wrapped, space=(WIDTH, 2))):
        assert speeds_of(given, t)["x"] == 1.5
        assert float(restriction_of(given, {"atoms": torch.tensor([1])})(torch.tensor(9.0), t)) == 1
        own = path_of(given, fmwc.flow.as_space((WIDTH, 2)))
        assert own == (wrapped.path if name == "predicting" else net.path)


def test_ends_of_a_guided_network_are_restricted():
    class Clamped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def restriction(self, y):
            return lambda x1, t: x1.clamp(-1, 1)

        def forward(self, x, t, y):
            return 500 * self.layer(x) * y[:, None]

    field = attach(Guided(Clamped(), 1.0, y=0), space=(2,))
    run = fmwc.sample(field, 8, steps=4, cond={"y": torch.ones(8)}, confidence=None)
    assert float(run.x.abs().max()) <= 1


@pytest.mark.parametrize("around", ["plain", "adapted", "sequential"])
def test_a_plain_wrapper_that_hides_a_declaration_is_refused(around):
    wrap = {
        "plain": Wrapper,
        "adapted": lambda net: adapt(Wrapper(net)),
        "sequential": lambda net: Wrapper(nn.ModuleDict({"inner": net})),
    }[around]
    with pytest.raises(UsageError, match="rows"):
        attach(wrap(Atoms()))
    with pytest.raises(UsageError, match="doubled"):
        attach(wrap(Guided(Tokens(), 1.0, y=0)))
    with pytest.raises(UsageError, match="path"):
        fmwc.flow_matching_loss(wrap(predicting(Tokens())), fmwc.flow.as_space((WIDTH, 2)), torch.randn(3, WIDTH, 2))


def test_a_plain_wrapper_of_a_restricted_network_is_not_sampled_without_its_restriction():
    sizes = torch.tensor([2, 3])
    allowed = torch.zeros(2, 8, dtype=torch.long).index_fill(1, torch.tensor([1, 4]), 1)
    cond = {"atoms": sizes, "elements": allowed}
    config = fmwc.sampling.SamplingConfig(space=cells.space())
    with pytest.raises(UsageError, match="restriction"):
        fmwc.sample(Wrapper(cells.small(dtype=torch.float32)), 2, steps=2, confidence=None, cond=cond, config=config)


def test_guidance_of_guidance_is_refused():
    with pytest.raises(UsageError, match="twice"):
        Guided(adapt(Guided(Tokens(), 1.0, y=0)), 1.0, z=0)


# ---- attention with parametrised weights -----------------------------------------------------------------------------


class Attends(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True, bias=bias)

    def forward(self, x, t):
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("which", ["out", "in", "both"])
def test_attention_with_parametrised_weights_keeps_its_noise(which, bias):
    plain, net, (x, t, _) = Attends(bias), Attends(bias), batch(1, 1)
    for name, module in {"in": {"in_proj_weight": net.attention}, "out": {"weight": net.attention.out_proj}}.items():
        if which in (name, "both"):
            parametrizations.weight_norm(*(next(iter(module.items()))[::-1]))
    field = attach(net, space=(WIDTH, 2), **NOISE)
    if which == "both" and not bias:  # nothing identifies the module
        with pytest.raises(UsageError, match="parametrised"):
            field.moments(x, t)
        return
    assert_as_drawn(field, x, t)
    torch.testing.assert_close(field.moments(x, t).var, attach(plain, space=(WIDTH, 2), **NOISE).moments(x, t).var)


def test_attentions_that_share_all_their_weights_are_refused():
    class Two(Attends):
        def __init__(self):
            super().__init__()
            self.other = nn.MultiheadAttention(2, 1, batch_first=True)
            self.other._parameters, self.other.out_proj = self.attention._parameters, self.attention.out_proj

        def forward(self, x, t):
            return super().forward(x, t) + self.other(x, x, x, need_weights=False)[0]

    with pytest.raises(UsageError, match="shared"):
        attach(Two(), space=(WIDTH, 2)).moments(*batch(1, 1)[:2])


# ---- transposed tangents ---------------------------------------------------------------------------------------------


def test_group_norms_of_transposed_inputs_have_tangents():
    """As in the attention of diffusers' UNet2DModel."""

    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.norm, self.last = nn.Linear(2, 8), nn.GroupNorm(2, 8), nn.Linear(8, 2)

        def forward(self, x, t):
            return self.last(self.norm(self.first(x).transpose(1, 2)).transpose(1, 2))

    assert_as_drawn(attach(Transposed(), space=(WIDTH, 2), **NOISE), *batch(1, 1)[:2], None, ["tangent", "linearised"])


# ---- names, conditions and weights -----------------------------------------------------------------------------------


def test_a_channel_named_x():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x, t):
            return {name: self.layer(value) for name, value in x.items()}

    x = {"x": torch.randn(4, 2), "y": torch.randn(4, 2)}
    two = attach(Named(), space=fmwc.flow.Space({name: fmwc.flow.Channel((2,)) for name in x}))
    assert two.moments(x, 0.5).var.keys() == x.keys()
    alone = attach(Named(), space=fmwc.flow.Space({"x": fmwc.flow.Channel((2,))}))
    with pytest.raises(UsageError, match="name"):
        alone.moments({"x": x["x"]}, 0.5)


class Labelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, t, label):
        return self.layer(torch.cat([x, label[:, None]], 1))


@pytest.mark.parametrize("wrap", [lambda net: net, adapt, lambda net: predicting(adapt(net))])
def test_a_forgotten_condition_is_named(wrap):
    field, x = attach(wrap(Labelled()), space=2), torch.randn(64, 2)
    for call in (
        lambda: fmwc.fit_confidence(field, x),
        lambda: fmwc.fit_noise(field, x, steps=1),
        lambda: fmwc.sample(field, 4, steps=2),
        lambda: fmwc.sample(field, 4, steps=2, confidence=None),
        lambda: field.moments(x, 0.5),
    ):
        with pytest.raises(UsageError, match="label") as said:
            call()
        assert "are cond" not in str(said.value)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x, t):
        return self.layer(x)


class Circle(nn.Module):
    """The exact flow to eight points on a circle."""

    def __init__(self):
        super().__init__()
        angle = torch.arange(8) * torch.pi / 4
        self.register_buffer("points", 2 * torch.stack([angle.cos(), angle.sin()], 1))
        self.layer = nn.Linear(2, 8, bias=False)
        self.layer.weight.data = self.points.clone()

    def forward(self, x, t):
        rest = (1 - t[:, None]).clamp(min=0.05)
        share = torch.softmax(self.layer(x) * t[:, None] / rest**2, 1)  # all points have the same norm
        return (share @ self.points - x) / rest


WITHOUT_LAYERS = {
    "scripted": torch.jit.script,
    "traced": lambda net: torch.jit.trace(net, (torch.zeros(3, 2), torch.zeros(3))),
    "quantised": lambda net: torch.ao.quantization.quantize_dynamic(net, {nn.Linear}),
}


@pytest.mark.filterwarnings("ignore")  # torch deprecates both
@pytest.mark.parametrize("kind", WITHOUT_LAYERS)
def test_networks_without_layers_for_noise_have_confidence_from_checks(kind):
    net = WITHOUT_LAYERS[kind](Circle().eval())
    field = attach(net, space=2)
    data = Circle().points.repeat(100, 1) + 0.05 * torch.randn(800, 2)
    fmwc.fit_confidence(field, data, pilot=200, steps=4, conventions=False)
    run = fmwc.sample(field, 10, steps=4, seed=1)
    expected = run.x0
    for step in range(4):
        expected = expected + net(expected, torch.full((10,), step / 4)) / 4
    torch.testing.assert_close(run.x, expected)
    assert ((run.confidence >= 0) & (run.confidence <= 1)).all()
    for call in (
        lambda: field.moments(data[:3], 0.5),
        lambda: field.draw(data[:3], 0.5),
        lambda: fmwc.fit_noise(field, data, steps=1, conventions=False),
        lambda: fmwc.sample(attach(net, space=2), 3, steps=2),
        lambda: attach(net, include=["layer"]),
    ):
        with pytest.raises(UsageError, match="layer"):
            call()


@pytest.mark.filterwarnings("error")  # such as an exception in Scope.__del__
def test_weights_created_in_inference_mode_name_the_fix():
    with torch.inference_mode():
        net = Plain()
    with pytest.raises(UsageError, match="deepcopy"):
        attach(net, space=2)
    field = attach(copy.deepcopy(net), space=2, **NOISE)
    with torch.inference_mode():
        again = attach(field.network, space=2, **NOISE)
    for made in (field, again):
        assert_as_drawn(made, torch.randn(2, 2), torch.rand(2))
        fmwc.fit_noise(made, torch.randn(8, 2), steps=1, conventions=False)
