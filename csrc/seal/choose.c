// SPDX-License-Identifier: Apache-2.0
/* Which cryptographic library seals: the fastest of those that compute what is published. */
#include "seal/seal.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "util/util.h"

#define ROUNDS          8u
#define PAGES_PER_ROUND 16u

static const struct iswi_seal_ops *const libraries_built[] = {
#ifdef ISW_HAVE_IPSEC_MB
	&iswi_seal_ipsec_mb,
#endif
#ifdef ISW_HAVE_OPENSSL
	&iswi_seal_openssl,
#endif
	NULL,
};

const struct iswi_seal_ops *const *iswi_seal_libraries(void)
{
	return libraries_built;
}

/* ----------------------------------------------------------------------- self-test */

/* In hexadecimal digits. */
struct published {
	const char *key, *nonce, *data, *plain, *sealed, *tag;
};

#define KEY_15   "feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308"
#define NONCE_15 "cafebabefacedbaddecaf888"
#define PLAIN_16                                                                                   \
	"d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"                         \
	"1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39"
#define SEALED_16                                                                                  \
	"522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"                         \
	"8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662"
#define ZEROS_12 "000000000000000000000000"
#define ZEROS_16 "00000000000000000000000000000000"

/* David A. McGrew and John Viega, "The Galois/Counter Mode of Operation (GCM)", cases 13 to 16. */
static const struct published published[] = {
	{ZEROS_16 ZEROS_16, ZEROS_12, "", "", "", "530f8afbc74536b9a963b4f1c4cb738b"},
	{ZEROS_16 ZEROS_16, ZEROS_12, "", ZEROS_16, "cea7403d4d606b6e074ec5d3baf39d18",
	 "d0d1c8a799996bf0265b98b5d48ab919"},
	{KEY_15, NONCE_15, "", PLAIN_16 "1aafd255", SEALED_16 "898015ad",
	 "b094dac5d93471bdec1a502270e3cc6c"},
	{KEY_15, NONCE_15, "feedfacedeadbeeffeedfacedeadbeefabaddad2", PLAIN_16, SEALED_16,
	 "76fc6ece0f4e1768cddf8853bb2d551b"},
};

/*
 * And a whole page: byte i is 7 * i + i / 256, key and nonce are bytes that count from 0, the
 * associated data is the number 7 in 8 bytes, little endian. The tag was computed by a plain
 * program in Python, straight from FIPS 197 and SP 800-38D, that uses no cryptographic library.
 */
static const char page_tag[] = "80926ce0234d76897735e1074d222b22";

/* Returns how many bytes it stored. */
static size_t from_hex(const char *digits, unsigned char *out)
{
	size_t bytes = strlen(digits) / 2;

	for (size_t i = 0; i < bytes; i++) {
		unsigned int byte = 0;

		sscanf(digits + 2 * i, "%2x", &byte);
		out[i] = (unsigned char)byte;
	}
	return bytes;
}

/* Whether `what` opens under its tag, and under no other one. */
static bool opens_once(const struct iswi_seal_ops *ops, struct iswi_sealer *sealer,
		       const struct iswi_sealing *what, const unsigned char *plain,
		       const unsigned char *tag)
{
	unsigned char other[ISWI_SEAL_TAG_BYTES];
	const unsigned char *out = what->out;

	memcpy(other, tag, sizeof(other));
	other[ISWI_SEAL_TAG_BYTES - 1] ^= 1;
	if (ops->open(sealer, what, other))
		return false;
	for (size_t i = 0; i < what->bytes; i++)
		if (out[i] != 0)
			return false;
	return ops->open(sealer, what, tag) && memcmp(out, plain, what->bytes) == 0;
}

static bool passes_published(const struct iswi_seal_ops *ops, struct iswi_sealer *sealer,
			     const struct published *test)
{
	unsigned char key[ISWI_SEAL_KEY_BYTES], tag[ISWI_SEAL_TAG_BYTES], want[ISWI_SEAL_TAG_BYTES];
	unsigned char data[32], plain[64], sealed[64], out[64];
	struct iswi_sealing what = {.data = data, .in = plain, .out = out};

	from_hex(test->key, key);
	from_hex(test->nonce, what.nonce);
	from_hex(test->tag, want);
	from_hex(test->sealed, sealed);
	what.data_bytes = from_hex(test->data, data);
	what.bytes = from_hex(test->plain, plain);
	ops->set_key(sealer, 0, key);
	ops->seal(sealer, &what, tag);
	if (memcmp(out, sealed, what.bytes) != 0 || !iswi_seal_tags_equal(tag, want))
		return false;
	what.in = sealed;
	return opens_once(ops, sealer, &what, plain, tag);
}

static bool passes_page(const struct iswi_seal_ops *ops, struct iswi_sealer *sealer)
{
	unsigned char key[ISWI_SEAL_KEY_BYTES], tag[ISWI_SEAL_TAG_BYTES], want[ISWI_SEAL_TAG_BYTES];
	unsigned char plain[ISW_PAGE_BYTES], sealed[ISW_PAGE_BYTES], out[ISW_PAGE_BYTES];
	const unsigned char number[8] = {7};
	struct iswi_sealing what = {.data = number, .data_bytes = sizeof(number)};

	for (unsigned int i = 0; i < sizeof(plain); i++)
		plain[i] = (unsigned char)(7 * i + i / 256);
	for (unsigned int i = 0; i < sizeof(key); i++)
		key[i] = (unsigned char)i;
	memcpy(what.nonce, key, sizeof(what.nonce));
	from_hex(page_tag, want);
	what.bytes = sizeof(plain);
	what.in = plain;
	what.out = sealed;
	ops->set_key(sealer, 0, key);
	ops->seal(sealer, &what, tag);
	what.in = sealed;
	what.out = out;
	return iswi_seal_tags_equal(tag, want) && opens_once(ops, sealer, &what, plain, tag);
}

static bool passes(const struct iswi_seal_ops *ops, struct iswi_sealer *sealer)
{
	for (size_t i = 0; i < ISWI_ARRAY_LEN(published); i++)
		if (!passes_published(ops, sealer, &published[i]))
			return false;
	return passes_page(ops, sealer);
}

/* ------------------------------------------------------------------------- choosing */

/* What some pages take to seal and open: the best round, which nothing has interrupted. */
static uint64_t time_ns(const struct iswi_seal_ops *ops, struct iswi_sealer *sealer)
{
	unsigned char page[ISW_PAGE_BYTES] = {0}, tag[ISWI_SEAL_TAG_BYTES];
	const struct iswi_sealing what = {.in = page, .out = page, .bytes = sizeof(page)};
	uint64_t best_ns = UINT64_MAX;

	for (uint32_t round = 0; round < ROUNDS; round++) {
		uint64_t start_ns = iswi_now_ns(), took_ns;

		for (uint32_t i = 0; i < PAGES_PER_ROUND; i++) {
			ops->seal(sealer, &what, tag);
			(void)ops->open(sealer, &what, tag);
		}
		took_ns = iswi_now_ns() - start_ns;
		best_ns = ISWI_MIN(best_ns, took_ns);
	}
	return best_ns;
}

/* UINT64_MAX: not to be used. *why_out gets the reason. */
static uint64_t measure(const struct iswi_seal_ops *ops, const char **why_out)
{
	struct iswi_sealer *sealer;
	uint64_t took_ns = UINT64_MAX;
	int code = ops->make(1, &sealer);

	if (code != 0) {
		*why_out = code == -ENOENT ? "it is not installed" : strerror(-code);
		return took_ns;
	}
	if (passes(ops, sealer))
		took_ns = time_ns(ops, sealer);
	else
		*why_out = "it fails its self-test";
	ops->destroy(sealer);
	return took_ns;
}

const struct iswi_seal_ops *iswi_seal_fastest(const struct iswi_seal_ops *const *libraries,
					      struct isw_error *error)
{
	const struct iswi_seal_ops *fastest = NULL, *useless = NULL;
	uint64_t fastest_ns = UINT64_MAX;
	const char *why = NULL;

	if (libraries[0] == NULL) {
		iswi_error(error, -ENOTSUP,
			   "this build cannot seal pages: OpenSSL's libcrypto was not found when "
			   "it was compiled; install libssl-dev and pkg-config (Debian: apt "
			   "install libssl-dev pkg-config), then install again");
		return NULL;
	}
	for (uint32_t i = 0; libraries[i] != NULL; i++) {
		uint64_t took_ns = measure(libraries[i], &why);

		if (took_ns == UINT64_MAX) {
			useless = libraries[i];
		} else if (took_ns < fastest_ns) {
			fastest = libraries[i];
			fastest_ns = took_ns;
		}
	}
	if (fastest == NULL)
		iswi_error(error, -ENOTSUP,
			   "%s cannot seal pages on this host: %s; install OpenSSL 3 "
			   "(Debian: apt install --reinstall libssl3)",
			   useless->name, why);
	return fastest;
}

const struct iswi_seal_ops *iswi_seal_choose(struct isw_error *error)
{
	return iswi_seal_fastest(libraries_built, error);
}

int isw_seal_check(const char **name_out, struct isw_error *error)
{
	const struct iswi_seal_ops *ops = iswi_seal_choose(error);

	if (ops == NULL)
		return -ENOTSUP;
	*name_out = ops->name;
	return 0;
}
