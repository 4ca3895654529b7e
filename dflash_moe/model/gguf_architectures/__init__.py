"""Translates GGUF models to what transformers knows: the metadata to a configuration, and the names
and layouts of the tensors to its own. `reading.py` has the entries.

GGUF has the names of llama.cpp, so that this is the one place that knows architectures by name.
SPDX-License-Identifier: Apache-2.0
"""
