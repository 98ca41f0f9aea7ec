"""What every process of Headway needs from Ray and the operating system."""
