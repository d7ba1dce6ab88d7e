"""Interactive galleries of report pages: their data and their scripts."""

import html
import json
import re
import shutil
import subprocess
from base64 import b64decode
from importlib.resources import files

import numpy as np
import pytest
from safetensors.numpy import load

from fmwc.crystals.structures import arrays_of, cell_matrix, from_cells
from fmwc.report.gallery import UNKNOWN, gallery, packed_curves, scripts
from fmwc.report.page import Section, write_page

WEB = files("fmwc") / "web"
MODULES = sorted(path.name for path in WEB.iterdir() if path.name.endswith(".js"))


def section(count=20, title="Points", **options):
    rng = np.random.default_rng(0)
    given = {"score": np.arange(count, 0.0, -1), "level": np.linspace(0, 1, count), "label": "confidence", **options}
    return gallery(title, "", "points", {"x": rng.normal(size=(count, 2))}, **given)


def data_of(page):
    """Return the data of a gallery, and its tensors."""
    data = json.loads(re.search(r'class="gallery-data">(.*?)</script>', page)[1])
    return data, load(b64decode(data["tensors"]))


# ---- data ------------------------------------------------------------------------------------------------------------


def test_data_is_embedded_surest_first_and_escaped():
    failed = np.where(np.arange(20) < 3, UNKNOWN, np.arange(20) % 2)
    columns = {"name": ["</script><b>"] * 20, "energy": [float("nan"), *range(19)]}
    page = str(section(failed=failed, columns=columns, word="</script>").html)
    assert page.count("</script>") == 1
    data, tensors = data_of(page)
    assert tensors["x"].shape == (20, 2)
    assert tensors["order"].tolist() == list(range(19, -1, -1))
    np.testing.assert_array_equal(tensors["failed"], failed)
    assert data["about"]["word"] == "</script>"
    assert data["table"]["columns"]["name"][0] == "</script><b>"
    assert data["table"]["columns"]["energy"][:2] == [None, 0]


@pytest.mark.parametrize("stride", [1, 4])
def test_curves_are_sorted_by_score_and_accurate(stride):
    score = np.array([3.0, 1.0, 2.0, 0.0])
    std = np.exp(np.random.default_rng(0).normal(size=(5, 4 // stride)))
    times = np.linspace(0, 0.8, 5)[:, None].repeat(4 // stride, 1)
    found = packed_curves(times, {"": std}, score, stride)
    low, high = found["range"]
    values = np.exp(low + (high - low) * found["codes"][""] / 255.0)
    expected = std.T[np.argsort(score)] if stride == 1 else std.T
    np.testing.assert_allclose(values, expected, rtol=(high - low) / 255)
    assert found["stride"] == stride
    assert packed_curves(times[:0], {"": std[:0]}, score) is None


def test_arrays_of_crystals():
    cubic = (np.array([4.0, 4, 4]), np.array([90.0, 90, 90]))
    hexagonal = (np.array([3.0, 3, 5]), np.array([90.0, 90, 120]))
    salt, iron = np.array([[0, 0, 0], [0.5, 0.5, 0.5]]), np.zeros((1, 3))
    cells = {"salt": (np.array([11, 17]), salt, *cubic), "iron": (np.array([26]), iron, *hexagonal)}
    arrays = arrays_of(from_cells(cells, 4))
    assert arrays["first"].tolist() == [0, 2, 3]
    assert arrays["species"].tolist() == [11, 17, 26]
    np.testing.assert_allclose(arrays["coord"], np.concatenate([salt, iron]), atol=1e-6)
    for lattice, (_, _, *cell) in zip(arrays["lattice"], cells.values(), strict=True):
        np.testing.assert_allclose(lattice, cell_matrix(*cell), atol=1e-5)


# ---- scripts ---------------------------------------------------------------------------------------------------------


def test_page_runs_only_its_own_scripts_and_loads_nothing(tmp_path):
    once = section()
    page = write_page(tmp_path / "page.html", "Page", [once, section(title="Other"), Section("No gallery")]).read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'")
    (script,) = scripts()
    assert page.count(script.text) == 1
    assert html.unescape(policy).endswith(f"script-src {script.hash}")
    assert not re.search(r'(src|href)\s*=\s*"(?!data:)', page)
    plain = write_page(tmp_path / "plain.html", "Page", [Section("No gallery")]).read_text()
    assert "<script" not in plain
    assert "script-src 'none'" in plain


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("name", [*MODULES, *(f"studio/{p.name}" for p in (WEB / "studio").iterdir())])
def test_modules_parse(name):
    source = (WEB / name).read_bytes()
    checked = subprocess.run(["node", "--input-type=module", "--check"], input=source, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr.decode()
