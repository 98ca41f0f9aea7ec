"""What every process of Headway needs from Ray and from the operating system."""
