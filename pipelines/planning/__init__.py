"""What is owed and who reads it: windows, origins, shapes, and the plan."""
