"""Models that run as transformers' own modules over our caches, attention and rounds.

What varies from family to family is read from the modules: there is no file per family.
"""

from magicdec.models.quantize import quiet_torchao

quiet_torchao()  # transformers, which every module here imports, imports it and lets it print
