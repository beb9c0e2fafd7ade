"""Pictures of a camera as H.264, a packet a step, without loss unless asked otherwise; needs the extra `video`.
Pictures come in, a ragged field of bytes goes out, and back.

```python
w.add_episode({"camera": video.encode(pictures), "action": actions})  # crf=23 for a small one with loss
part = ep.read(["action"], start=40, stop=50, derive=video.pictures("camera"))
part["camera_pictures"]  # uint8 [10, height, width, 3]
```

A field of packets is cut, evicted, filtered, moved and merged as any other; only who reads it knows that it is a video.
Packets end to end are a stream that other players open.
"""

from __future__ import annotations

from archive.adapters.video.decoding import decode, decoded, is_key, is_packets, pictures
from archive.adapters.video.encoding import Encoder, encode, pyav

__all__ = [
    "Encoder",
    "decode",
    "decoded",
    "encode",
    "is_key",
    "is_packets",
    "pictures",
    "pyav",
]
