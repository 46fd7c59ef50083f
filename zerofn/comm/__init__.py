"""Between ranks: the mesh, transfers as a start and a wait, agreement through the rendezvous store."""
