"""Random histories of an archive, and a perfect model of what it must hold."""
