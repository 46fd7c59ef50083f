"""Between ranks: meshes and their axes, process groups, and transfers as a start and a wait."""
