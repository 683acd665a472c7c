"""Where the capture processor stood, for those who name it: see `lmpool.backends.vllm.capture`."""

from lmpool.backends.vllm.capture import CAPTURE, WATCH, CapturedRows, CaptureProcessor

__all__ = ["CAPTURE", "WATCH", "CaptureProcessor", "CapturedRows"]
