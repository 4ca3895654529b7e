"""The server: `dflash-moe serve` is the engine process, and its child, the front, speaks HTTP
(docs/decisions/0067-two-processes-of-the-server.md).

- `listening` binds the port, `api_keys` reads who may ask, `model_facts` is what the front is told
  of a model.
- `chat_probes` are conversations that say how a chat template writes, `chat_form` finds in them
  how calls and thoughts are written, and `chat_proof` proves it.
- `front_keeper` starts fronts and replaces those that end; `relay` carries one front's requests to
  the engine and tokens back.
- `serving` is the life of the whole: loading, ready, draining, over.
- `front` is the child's part, in a room of its own without torch.

SPDX-License-Identifier: Apache-2.0
"""
