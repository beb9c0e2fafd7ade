"""Real code of the library on a simulated store, time, threads and randomness, all replayed from one seed."""
