//! Rebuilds when a migration is added: the macro that embeds them only sees those it knew.
fn main() {
    println!("cargo:rerun-if-changed=migrations");
}
