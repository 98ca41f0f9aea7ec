"""Tools that every process of Headway needs, of Ray and of the operating system."""
