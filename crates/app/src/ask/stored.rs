//! Tensor headers beside the config: two accounts of one model, which must agree.

use std::collections::BTreeMap;

use vramcast_core::dtype::DType;
use vramcast_core::model::Model;
use vramcast_core::source::StoredType;
use vramcast_core::units::show_count;

use crate::failure::{Failure, Place};
use crate::fetch::TensorFiles;

/// Refuses files whose tensors have other sizes than the config's model; says where a model that was only assumed has
/// another number of parameters than they.
pub(super) fn compare(model: &Model, files: &TensorFiles, assumed: bool) -> Result<Option<String>, Failure> {
    // Without a readable config there is nothing to compare; whoever asks hears of it.
    let Ok(inventory) = model.inventory() else { return Ok(None) };
    if assumed {
        let stored: u64 = files.tensors().map(|tensor| tensor.elements()).fold(0, u64::saturating_add);
        let total = inventory.total();
        return Ok((stored != total).then(|| {
            format!("its files hold {} elements, what is assumed has {}", show_count(stored), show_count(total))
        }));
    }
    let shapes: BTreeMap<&str, Vec<u64>> =
        inventory.parameters.iter().map(|one| (one.name.as_str(), one.shape.sizes().to_vec())).collect();
    for file in &files.files {
        // Packed weights have shapes of their own.
        let plain = |kind: &StoredType| matches!(kind, StoredType::Plain(DType::F32 | DType::BF16 | DType::F16));
        for tensor in file.tensors.iter().filter(|tensor| plain(&tensor.stored)) {
            let Some(expected) = shapes.get(tensor.name.as_str()) else { continue };
            if *expected != tensor.shape {
                let said = format!(
                    "config.json and {} contradict each other: {} is {expected:?} by the config and {:?} in the file",
                    file.name, tensor.name, tensor.shape
                );
                return Err(Failure::bad_input(said)
                    .hint("give the config.json that belongs to these files")
                    .at(Place::Config(String::new())));
            }
        }
    }
    Ok(None)
}
