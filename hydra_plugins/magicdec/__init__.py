"""The launcher and the sweeper of magicdec's multiruns.

Hydra imports the modules of `hydra_plugins` in every app of an environment, except those whose
names begin with an underscore. All modules here do: the command line registers what it needs, and
other apps never see it.
"""
