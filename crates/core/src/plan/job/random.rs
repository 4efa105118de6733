//! The numbers that Python and torch draw: samplers shuffle with them, so a seed says in which order samples come.

/// MT19937, the generator behind `random.Random` and `torch.Generator` on the host.
pub struct Twister {
    state: [u32; Self::SIZE],
    at: usize,
}

impl Twister {
    const SIZE: usize = 624;

    /// As `torch.Generator.manual_seed` starts it (c10/core, MT19937RNGEngine.h).
    pub fn torch(seed: u64) -> Self {
        let mut state = [0; Self::SIZE];
        state[0] = seed as u32;
        for at in 1..Self::SIZE {
            let last: u32 = state[at - 1];
            state[at] = 1_812_433_253u32.wrapping_mul(last ^ (last >> 30)).wrapping_add(at as u32);
        }
        Self { state, at: Self::SIZE }
    }

    /// As `random.Random(seed)` starts it (Modules/_randommodule.c, `init_by_array`).
    pub fn python(seed: u64) -> Self {
        let mut key = vec![seed as u32];
        if seed >> 32 > 0 {
            key.push((seed >> 32) as u32);
        }
        let mut made = Self::torch(19_650_218);
        let state = &mut made.state;
        let (mut i, mut j) = (1, 0);
        let step = |state: &mut [u32; Self::SIZE], i: &mut usize| {
            *i += 1;
            if *i >= Self::SIZE {
                state[0] = state[Self::SIZE - 1];
                *i = 1;
            }
        };
        for _ in 0..Self::SIZE.max(key.len()) {
            let mixed = (state[i - 1] ^ (state[i - 1] >> 30)).wrapping_mul(1_664_525);
            state[i] = (state[i] ^ mixed).wrapping_add(key[j]).wrapping_add(j as u32);
            step(state, &mut i);
            j = (j + 1) % key.len();
        }
        for _ in 1..Self::SIZE {
            let mixed = (state[i - 1] ^ (state[i - 1] >> 30)).wrapping_mul(1_566_083_941);
            state[i] = (state[i] ^ mixed).wrapping_sub(i as u32);
            step(state, &mut i);
        }
        state[0] = 1 << 31;
        made
    }

    /// The next 32 bits.
    pub fn bits(&mut self) -> u32 {
        if self.at >= Self::SIZE {
            for at in 0..Self::SIZE {
                let joined = (self.state[at] & (1 << 31)) | (self.state[(at + 1) % Self::SIZE] & !(1 << 31));
                let twist = if joined & 1 == 1 { 0x9908_b0df } else { 0 };
                self.state[at] = self.state[(at + 397) % Self::SIZE] ^ (joined >> 1) ^ twist;
            }
            self.at = 0;
        }
        let mut bits = self.state[self.at];
        self.at += 1;
        bits ^= bits >> 11;
        bits ^= (bits << 7) & 0x9d2c_5680;
        bits ^= (bits << 15) & 0xefc6_0000;
        bits ^ (bits >> 18)
    }

    /// `random.random()`: from 0 up to 1.
    pub fn unit(&mut self) -> f64 {
        let (high, low) = (self.bits() >> 5, self.bits() >> 6);
        (f64::from(high) * 67_108_864.0 + f64::from(low)) / 9_007_199_254_740_992.0
    }

    /// `random.normalvariate`: the ratio of uniforms of Kinderman and Monahan, as Lib/random.py has it.
    pub fn normal(&mut self, mean: f64, deviation: f64) -> f64 {
        let magic = 4.0 * (-0.5f64).exp() / 2f64.sqrt();
        loop {
            let (first, second) = (self.unit(), 1.0 - self.unit());
            let z = magic * (first - 0.5) / second;
            if z * z / 4.0 <= -second.ln() {
                return mean + z * deviation;
            }
        }
    }

    /// `torch.randperm` (`randperm_cpu`, TensorFactories.cpp).
    pub fn permutation(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for at in 0..count.saturating_sub(1) {
            let other = at + self.bits() as usize % (count - at);
            order.swap(at, other);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_python_and_torch() {
        // random.Random(0).random(), twice.
        let mut python = Twister::python(0);
        assert_eq!([python.unit(), python.unit()], [0.844_421_851_525_048_1, 0.757_954_402_940_302_5]);
        // torch.manual_seed(42); torch.randperm(10)
        assert_eq!(Twister::torch(42).permutation(10), [2, 6, 1, 8, 4, 5, 0, 9, 3, 7]);
    }
}
