"""Confidence for other libraries. Each module needs its library; importing this package needs none.

| module | library | what it does |
|---|---|---|
| `fmwc.integrations.diffusers` | diffusers | confidence and doubt maps of images, early stop, best of n, checks |
| `fmwc.integrations.hub` | Hugging Face hub | saves, shares and loads fields with a model card |
| `fmwc.integrations.lightning` | Lightning | reports confidence while training; fits the noise at the end |
| `fmwc.integrations.omatg` | OMatG | adapters of crystal generators |
"""
