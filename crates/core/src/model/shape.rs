//! Sizes of a tensor: a small copyable list.

/// How many dimensions a tensor can have here; vision models fold windows in eight.
pub const MAX_DIMS: usize = 8;

/// The sizes of a tensor, outermost first.
#[derive(Clone, Copy, Eq, PartialOrd, Ord)]
pub struct Shape {
    len: u8,
    sizes: [u64; MAX_DIMS],
}

impl PartialEq for Shape {
    /// Compared more often than anything else: word by word, without a call. What is past the last dimension is always 1.
    fn eq(&self, other: &Self) -> bool {
        let differ = self.sizes.iter().zip(&other.sizes).fold(0, |bits, (a, b)| bits | (a ^ b));
        self.len == other.len && differ == 0
    }
}

impl Shape {
    /// A shape of these sizes; dimensions past [`MAX_DIMS`] are folded into the last.
    pub fn new(sizes: &[u64]) -> Self {
        let mut shape = Self { len: 0, sizes: [1; MAX_DIMS] };
        for &size in sizes {
            if (shape.len as usize) < MAX_DIMS {
                shape.sizes[shape.len as usize] = size;
                shape.len += 1;
            } else {
                shape.sizes[MAX_DIMS - 1] = shape.sizes[MAX_DIMS - 1].saturating_mul(size);
            }
        }
        shape
    }

    /// The sizes, outermost first.
    pub fn sizes(&self) -> &[u64] {
        &self.sizes[..self.len as usize]
    }

    /// How many dimensions there are.
    pub fn rank(&self) -> usize {
        self.len as usize
    }

    /// How many elements there are (saturating).
    pub fn elements(&self) -> u64 {
        self.sizes().iter().fold(1, |product: u64, &size| product.saturating_mul(size))
    }

    /// The size of one dimension; negative counts from the end; 1 where there is none.
    pub fn size(&self, dim: i64) -> u64 {
        self.axis(dim).map_or(1, |axis| self.sizes[axis])
    }

    /// The last size (1 for a scalar).
    pub fn last(&self) -> u64 {
        self.size(-1)
    }

    /// A dimension counted from the front, `None` when out of range.
    pub fn axis(&self, dim: i64) -> Option<usize> {
        let axis = if dim < 0 { dim + i64::from(self.len) } else { dim };
        usize::try_from(axis).ok().filter(|&axis| axis < self.rank())
    }

    /// The same shape with one size changed.
    pub fn with(&self, dim: i64, size: u64) -> Self {
        let mut shape = *self;
        if let Some(axis) = self.axis(dim) {
            shape.sizes[axis] = size;
        }
        shape
    }

    /// The same shape with a dimension inserted before `dim` (negative: after the last).
    pub fn inserted(&self, dim: i64, size: u64) -> Self {
        let at = if dim < 0 { (dim + 1 + i64::from(self.len)).max(0) as usize } else { dim as usize };
        let mut sizes = self.sizes().to_vec();
        sizes.insert(at.min(sizes.len()), size);
        Self::new(&sizes)
    }

    /// The same shape without one dimension.
    pub fn removed(&self, dim: i64) -> Self {
        let mut sizes = self.sizes().to_vec();
        if let Some(axis) = self.axis(dim) {
            sizes.remove(axis);
        }
        Self::new(&sizes)
    }

    /// The shape two tensors broadcast to, if they do.
    pub fn broadcast(&self, other: &Self) -> Option<Self> {
        if self == other {
            return Some(*self);
        }
        let rank = self.rank().max(other.rank());
        let mut sizes = [1; MAX_DIMS];
        for back in 1..=rank as i64 {
            let (a, b) = (self.size(-back), other.size(-back));
            sizes[rank - back as usize] = match (a, b) {
                _ if a == b => a,
                (1, _) => b,
                (_, 1) => a,
                _ => return None,
            };
        }
        Some(Self { len: rank as u8, sizes })
    }
}

impl From<&[u64]> for Shape {
    fn from(sizes: &[u64]) -> Self {
        Self::new(sizes)
    }
}

impl<const N: usize> From<[u64; N]> for Shape {
    fn from(sizes: [u64; N]) -> Self {
        Self::new(&sizes)
    }
}

impl std::fmt::Debug for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.sizes()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broadcasting_follows_the_usual_rules() {
        let a = Shape::from([2, 1, 4]);
        assert_eq!(a.broadcast(&Shape::from([3, 1])), Some(Shape::from([2, 3, 4])));
        assert_eq!(a.broadcast(&Shape::from([3])), None);
    }

    #[test]
    fn dimensions_count_from_both_ends() {
        let a = Shape::from([2, 3, 4]);
        assert_eq!((a.size(0), a.size(-1), a.axis(3)), (2, 4, None));
        assert_eq!(a.inserted(-1, 5), Shape::from([2, 3, 4, 5]));
        assert_eq!(a.removed(1).elements(), 8);
    }
}
