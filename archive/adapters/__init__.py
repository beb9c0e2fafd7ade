"""Adapters: the replay buffers of other systems, saved to an archive and restored from it. Each imports its system lazily."""
