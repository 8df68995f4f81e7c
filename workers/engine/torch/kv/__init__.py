"""KV of a real model for transfers: its layout, the model that computed it, its memory."""
