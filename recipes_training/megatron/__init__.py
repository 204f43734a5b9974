"""The Megatron trainer: Megatron-Core's GPTModel with its distributed optimizer."""

import warnings

# Megatron tells at its import of each library that it does without.
warnings.filterwarnings("ignore", module=r"megatron\.")
