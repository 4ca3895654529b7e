"""The engine runs many requests of one model at once. `LLM` (llm.py) is its face; `engine` is one
thread that goes from step to step: plan, begin, run, sample, commit, deliver.

- `step_planner` decides what the next step computes, by `schedule`: who decodes, which part of
  which prompt is computed, what a prefix cache has already, and who gives up blocks when none are
  left (the youngest, which is computed again).
- `step_run` runs a plan and judges drafts (`speculate`, `prompt_lookup`, `step_price`,
  `sampling/acceptance`). Where a step fails all requests that are in it end with the error, no
  token of it is left in the cache, and it is not tried again; all others are as before. What is
  wrong with one row, such as its mask, ends that request alone. An EngineError, a fault of the
  engine's own, ends it and all requests.
- `sampling/sample` makes tokens of logits; beside it `sampling_params`, what was asked for,
  `sampling_state`, what is remembered of a request, `draw`, the random part, `token_masks`, what a
  grammar allows, and `logprobs`.
- `request` is one, and `open_requests` has those that have not ended. `delivery` is the door:
  commands in, tokens out, under a lock that the engine takes once a step, and the outbox, which
  gets all tokens of a client's requests in one call. Text is made by the callers' threads (`text`,
  `prompt_runs`), or in a process without torch.
- `prompt_check` refuses what can never be computed. `chat_history` and `chat_prompts` are
  conversations.

SPDX-License-Identifier: Apache-2.0
"""
