"""The front: a process that turns HTTP and text into token ids and back. It has neither torch nor
transformers, and it never sees a tensor.

- `start` is its first file, `process` its life.
- `frames` is what travels between it and the engine process; `engine_link` its end of that.
- `http_protocol` bounds connections, `guard` says who may ask, `application` has the routes.
- `request_fields` and `sampling_fields` read bodies, `prompts` makes token ids of them, with
  `tokens` (the tokenizer) and `remembered` (answers that the model gave).
- `chat_request` checks tools and messages. `call_forms` is how a model writes calls and thoughts,
  as data, and `readers` makes what finds them in an answer's text: `form_reader` a message,
  `call_reader` and `object_call` one call, `harmony_reader` the channels of gpt-oss, all of them
  over `growing_reader` and `text_source`. `message_pieces` is what they find.
- `anthropic_request` and `responses_request` make a chat of bodies of other APIs (`translation`).
- `answer` is what comes back; `event_stream` writes it in the forms of `replies`,
  `anthropic_reply` and `responses_reply` (`message_blocks`).

SPDX-License-Identifier: Apache-2.0
"""
