//! What NCCL holds for a group beside the communicator itself: the buffers through which its ranks reach each other.
//!
//! Sizes are NCCL 2.28's: a connection has a buffer for each protocol (LL, LL128 and Simple), which the driver hands out
//! in whole units of 2 MiB, and two small structures of one unit each. That a pair of cards has 14 MiB a channel at the
//! default buffer is what github.com/NVIDIA/nccl/issues/1685 counts: allocations of 10 MiB and 2 MiB, and 3.3 GB for 7
//! peers with 32 channels. Groups of several ranks were not measured here.

use crate::plan::machine::Machine;
use crate::plan::parallel::mesh::Traffic;

/// What the driver hands out at once (`CU_MEM_ALLOC_GRANULARITY_RECOMMENDED` of `cuMemGetAllocationGranularity`).
const UNIT: u64 = 2 << 20;

/// LL's buffer: 8 lines of 16 bytes for each of 512 threads, in 8 steps.
const LOW_LATENCY: u64 = 8 * 16 * 512 * 8;

/// LL128's buffer: 120 words of 8 bytes for each of 640 threads, in 8 steps.
const LOW_LATENCY_128: u64 = 120 * 8 * 640 * 8;

/// Channels to a peer that is sent to directly, as the issue above shows them on H100.
const CHANNELS_TO_A_PEER: u64 = 32;

/// Bytes of one channel between a card and a peer.
fn connection(buffer: u64) -> u64 {
    let buffers = buffer.saturating_add(LOW_LATENCY + LOW_LATENCY_128);
    buffers.div_ceil(UNIT).saturating_mul(UNIT).saturating_add(2 * UNIT)
}

/// Bytes of the connections of a group of `ranks`.
pub fn connections(ranks: u64, traffic: Traffic, machine: &Machine) -> u64 {
    let one = connection(machine.nccl_buffer);
    let direct = |peers: u64| {
        let channels = CHANNELS_TO_A_PEER.min(machine.nccl_channels.saturating_mul(2));
        one.saturating_mul(peers).saturating_mul(channels)
    };
    match traffic {
        _ if ranks < 2 => 0,
        // Everyone hears one neighbour and speaks to the other.
        Traffic::Ring => one.saturating_mul(machine.nccl_channels),
        Traffic::Neighbours => direct(2.min(ranks - 1)),
        Traffic::Everyone => direct(ranks - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_channel_between_two_cards_is_14_mib() {
        assert_eq!(connection(4 * MIB), 14 * MIB);
        assert_eq!(connection(MIB), 12 * MIB);
    }

    #[test]
    fn exchanges_among_all_grow_with_the_peers_and_rings_do_not() {
        let machine = Machine::default();
        assert_eq!(connections(8, Traffic::Everyone, &machine), 7 * 32 * 14 * MIB);
        assert_eq!(connections(2, Traffic::Ring, &machine), connections(64, Traffic::Ring, &machine));
        assert_eq!(connections(1, Traffic::Ring, &machine), 0);
        assert!(connections(2, Traffic::Neighbours, &machine) < connections(4, Traffic::Neighbours, &machine));
    }
}
