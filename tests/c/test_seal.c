// SPDX-License-Identifier: Apache-2.0
/* Sealing, by each library of this build: what is published, what is refused, which is chosen. */
#define _GNU_SOURCE 1
#define OWN_MAIN    1
#include <errno.h>
#include <unistd.h>

#include "seal_libraries.h"

/* ---------------------------------------------------------------- what is published */

static size_t from_hex(const char *digits, unsigned char *out)
{
	size_t bytes = strlen(digits) / 2;

	for (size_t i = 0; i < bytes; i++)
		CHECK_EQ(sscanf(digits + 2 * i, "%2hhx", &out[i]), 1);
	return bytes;
}

/*
 * NIST's Cryptographic Algorithm Validation Program, gcmtestvectors.zip (CAVS 14.0): of
 * gcmEncryptExtIV256.rsp and gcmDecrypt256.rsp, IVlen 96, AADlen 128, Taglen 128. Others than those
 * of the self-test. No plain text: the file says FAIL.
 */
static const struct {
	const char *key, *nonce, *data, *plain, *sealed, *tag;
} published[] = {
	{"78dc4e0aaf52d935c3c01eea57428f00ca1fd475f5da86a49c8dd73d68c8e223",
	 "d79cf22d504cc793c3fb6c8a", "b96baa8c1c75a671bfb2d08d06be5f36", "", "",
	 "3e5d486aa2e30b22e040b85723a06e76"},
	{"7da3bccaffb3464178ca7c722379836db50ce0bfb47640b9572163865332e486",
	 "c04fd2e701c3dc62b68738b3", "fec0311013202e4ffdc4204926ae0ddf",
	 "fd671cab1ee21f0df6bb610bf94f0e69", "6be61b17b7f7d494a7cdf270562f37ba",
	 "5e702a38323fe1160b780d17adad3e96"},
	{"8c83238e7b3b58278200b54940d779d0a0750673aab0bf2f5808dd15dc1a8c49",
	 "70f8f4ebe408f61a35077956", "e1cbf83924f1b8d1014b97db56c25a15",
	 "6e57f8572dd5b2247410f0d4c7424186", "4a11acb9611251df01f79f16f8201ffb",
	 "9732be4ad0569586753d90fabb06f62c"},
	{"54e352ea1d84bfe64a1011096111fbe7668ad2203d902a01458c3bbd85bfce14",
	 "df7c3bca00396d0c018495d9", "7e968d71b50c1f11fd001f3fef49d045",
	 "85fc3dfad9b5a8d3258e4fc44571bd3b", "426e0efc693b7be1f3018db7ddbb7e4d",
	 "ee8257795be6a1164d7e1d2d6cac77a7"},
	{"82f0d1ddc58123f805541f55a7eab43f56ddfefc06c73d57709df3d5a4aabfb3",
	 "0c9d74af29ed4406c77a8e4b", "34325620a392739beeee6c370967d539",
	 "3fe7811a8224a1881da34a27e03da86a", "c61155d41495e9fc76060fe7f8c926a2",
	 "66d8c881d66370504d2bf00cdb06259e"},
	{"9a0343f850a6427120f764789ffec6d237447b898fbf51d2182f065d3861497d",
	 "3deef6f453dd70d92143adcd", "dbb8226a624520863db6897017b2a4f8", NULL,
	 "e93165935ac18e3a2845d15fe31a9286", "f5fc50d18766bc3d9e16dd136d45816b"},
	{"2a765ceac97265c15209eea90bea85cd9586b972160502ff592a306dc017e6b9",
	 "62c545d9d4e3c7acb66b4bf1", "7d12474e23dc233bc6312d4d5b2deee4", NULL,
	 "ae0594a7b66d3a958e4e6212d3288f91", "ec9aa846d185cc0f43d392240cd6e2c4"},
};

TEST_CASES(test_published_values, LIBRARIES_MAX, n)
{
	const struct iswi_seal_ops *ops = library(n);
	struct iswi_sealer *sealer = make_sealer(ops);

	for (size_t i = 0; sealer != NULL && i < sizeof(published) / sizeof(published[0]); i++) {
		unsigned char key[32], data[16], plain[16], sealed[16], tag[16], out[16], got[16];
		struct iswi_sealing what = {.key = 1, .data = data, .in = plain, .out = out};

		from_hex(published[i].key, key);
		from_hex(published[i].nonce, what.nonce);
		from_hex(published[i].tag, tag);
		what.data_bytes = from_hex(published[i].data, data);
		what.bytes = from_hex(published[i].sealed, sealed);
		ops->set_key(sealer, 1, key);
		if (published[i].plain != NULL) {
			from_hex(published[i].plain, plain);
			ops->seal(sealer, &what, got);
			CHECK(memcmp(out, sealed, what.bytes) == 0);
			CHECK(memcmp(got, tag, sizeof(tag)) == 0);
		}
		what.in = sealed;
		CHECK_EQ(ops->open(sealer, &what, tag), published[i].plain != NULL);
		if (published[i].plain != NULL)
			CHECK(memcmp(out, plain, what.bytes) == 0);
		else
			CHECK(all_zeros(out, what.bytes));
	}
	if (sealer != NULL)
		ops->destroy(sealer);
}

/* Neither data, nor anything to seal, nor memory for it. */
TEST_CASES(test_nothing_is_sealed_as_well, LIBRARIES_MAX, n)
{
	const struct iswi_seal_ops *ops = library(n);
	struct iswi_sealer *sealer = make_sealer(ops);
	const struct iswi_sealing nothing = {0};
	unsigned char tag[ISWI_SEAL_TAG_BYTES];

	if (sealer == NULL)
		return;
	ops->seal(sealer, &nothing, tag);
	CHECK(ops->open(sealer, &nothing, tag));
	tag[0] ^= 1;
	CHECK(!ops->open(sealer, &nothing, tag));
	ops->destroy(sealer);
}

/* Each size and each alignment, by each library, opened by each, in place and not. */
TEST_CASES(test_libraries_agree, LIBRARIES_MAX *LIBRARIES_MAX, n)
{
	const struct iswi_seal_ops *one = library(n / LIBRARIES_MAX);
	const struct iswi_seal_ops *other = library(n % LIBRARIES_MAX);
	struct iswi_sealer *sealer = make_sealer(one), *opener = make_sealer(other);
	static unsigned char plain[4200], room[4200];
	static const size_t sizes[] = {1, 15, 16, 17, 60, 127, 128, 255, 257, 1024, 4095, 4096};

	fill(plain, sizeof(plain), 1);
	for (size_t i = 0; sealer && opener && i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		for (uint32_t offset = 0; offset < 18; offset++) {
			unsigned char tag[ISWI_SEAL_TAG_BYTES], *at = room + offset;
			struct iswi_sealing what = {.key = offset % KEYS, .bytes = sizes[i]};

			fill(what.nonce, sizeof(what.nonce), (uint32_t)i * 100 + offset);
			what.data = plain + 7;
			what.data_bytes = offset;
			what.in = plain + offset;
			what.out = at;
			one->seal(sealer, &what, tag);
			if (sizes[i] > 15)
				CHECK(memcmp(at, plain + offset, sizes[i]) != 0);
			what.in = at;
			CHECK(other->open(opener, &what, tag));
			CHECK(memcmp(at, plain + offset, sizes[i]) == 0);
			one->seal(sealer, &what, tag);
			CHECK(other->open(opener, &what, tag));
			CHECK(memcmp(at, plain + offset, sizes[i]) == 0);
		}
	}
	if (sealer != NULL)
		one->destroy(sealer);
	if (opener != NULL)
		other->destroy(opener);
}

/* ------------------------------------------------------------------ what is refused */

struct sealed_page {
	struct iswi_sealing what;
	unsigned char data[8], plain[ISW_PAGE_BYTES], sealed[ISW_PAGE_BYTES], out[ISW_PAGE_BYTES];
	unsigned char tag[ISWI_SEAL_TAG_BYTES];
};

static void seal_page(const struct iswi_seal_ops *ops, struct iswi_sealer *sealer,
		      struct sealed_page *page)
{
	*page = (struct sealed_page){.data = {7}};
	fill(page->plain, sizeof(page->plain), 2);
	fill(page->what.nonce, sizeof(page->what.nonce), 3);
	page->what.data = page->data;
	page->what.data_bytes = sizeof(page->data);
	page->what.bytes = sizeof(page->plain);
	page->what.in = page->plain;
	page->what.out = page->sealed;
	ops->seal(sealer, &page->what, page->tag);
	page->what.in = page->sealed;
	page->what.out = page->out;
}

static void check_opens(const struct iswi_seal_ops *ops, struct iswi_sealer *sealer,
			struct sealed_page *page)
{
	CHECK(ops->open(sealer, &page->what, page->tag));
	CHECK(memcmp(page->out, page->plain, sizeof(page->plain)) == 0);
}

static void check_refuses(const struct iswi_seal_ops *ops, struct iswi_sealer *sealer,
			  struct sealed_page *page)
{
	unsigned char kept[ISW_PAGE_BYTES];

	memset(page->out, 0x55, sizeof(page->out));
	CHECK(!ops->open(sealer, &page->what, page->tag));
	CHECK(all_zeros(page->out, sizeof(page->out)));
	memcpy(kept, page->sealed, sizeof(kept));
	page->what.out = page->sealed;
	CHECK(!ops->open(sealer, &page->what, page->tag));
	CHECK(all_zeros(page->sealed, sizeof(page->sealed)));
	memcpy(page->sealed, kept, sizeof(kept));
	page->what.out = page->out;
}

/* Each bit of these bytes matters. */
static void check_bits(const struct iswi_seal_ops *ops, struct iswi_sealer *sealer,
		       struct sealed_page *page, unsigned char *bytes, size_t count, size_t step)
{
	for (size_t bit = 0; bit < count * 8; bit += step) {
		bytes[bit / 8] ^= (unsigned char)(1u << bit % 8);
		check_refuses(ops, sealer, page);
		bytes[bit / 8] ^= (unsigned char)(1u << bit % 8);
	}
	check_opens(ops, sealer, page);
}

TEST_CASES(test_altered_bits_are_refused, LIBRARIES_MAX, n)
{
	const struct iswi_seal_ops *ops = library(n);
	struct iswi_sealer *sealer = make_sealer(ops);
	static struct sealed_page page;

	if (sealer == NULL)
		return;
	seal_page(ops, sealer, &page);
	check_opens(ops, sealer, &page);
	check_bits(ops, sealer, &page, page.tag, sizeof(page.tag), 1);
	check_bits(ops, sealer, &page, page.what.nonce, sizeof(page.what.nonce), 1);
	check_bits(ops, sealer, &page, page.data, sizeof(page.data), 1);
	check_bits(ops, sealer, &page, page.sealed, sizeof(page.sealed), 61);
	ops->destroy(sealer);
}

TEST_CASES(test_another_key_is_refused, LIBRARIES_MAX, n)
{
	const struct iswi_seal_ops *ops = library(n);
	struct iswi_sealer *sealer = make_sealer(ops);
	unsigned char key[ISWI_SEAL_KEY_BYTES];
	static struct sealed_page page;

	if (sealer == NULL)
		return;
	seal_page(ops, sealer, &page);
	page.what.key = 1;
	check_refuses(ops, sealer, &page);
	page.what.key = 0;
	check_opens(ops, sealer, &page);
	/* Another key at the same number, at once; then the former one again. */
	memset(key, 0xa0, sizeof(key));
	key[31] ^= 1;
	ops->set_key(sealer, 0, key);
	check_refuses(ops, sealer, &page);
	key[31] ^= 1;
	ops->set_key(sealer, 0, key);
	check_opens(ops, sealer, &page);
	ops->destroy(sealer);
}

TEST(test_tags_are_compared_whole)
{
	unsigned char a[ISWI_SEAL_TAG_BYTES], b[ISWI_SEAL_TAG_BYTES];

	fill(a, sizeof(a), 4);
	memcpy(b, a, sizeof(b));
	CHECK(iswi_seal_tags_equal(a, b));
	for (uint32_t bit = 0; bit < sizeof(a) * 8; bit++) {
		b[bit / 8] ^= (unsigned char)(1u << bit % 8);
		CHECK(!iswi_seal_tags_equal(a, b));
		b[bit / 8] ^= (unsigned char)(1u << bit % 8);
	}
}

/* ------------------------------------------------------------------------- choosing */

/* What the tables below do with the first library's sealer. */
static void seal_slowly(struct iswi_sealer *sealer, const struct iswi_sealing *what,
			unsigned char *tag_out)
{
	usleep(100);
	library(0)->seal(sealer, what, tag_out);
}

static void seal_wrongly(struct iswi_sealer *sealer, const struct iswi_sealing *what,
			 unsigned char *tag_out)
{
	library(0)->seal(sealer, what, tag_out);
	if (what->bytes == ISW_PAGE_BYTES)
		tag_out[15] ^= 1;
}

/* Right, but it believes every tag: in counter mode, sealing what is sealed opens it. */
static bool open_anything(struct iswi_sealer *sealer, const struct iswi_sealing *what,
			  const unsigned char *tag)
{
	unsigned char unused[ISWI_SEAL_TAG_BYTES];

	(void)tag;
	library(0)->seal(sealer, what, unused);
	return true;
}

static int cannot_make(uint32_t keys, struct iswi_sealer **sealer_out)
{
	(void)keys;
	(void)sealer_out;
	return -ENOTSUP;
}

TEST(test_what_fails_its_self_test_is_never_chosen)
{
	struct iswi_seal_ops slow, wrong, credulous, absent;
	const struct iswi_seal_ops *some[] = {&wrong, &absent, &credulous, &slow, NULL};
	struct isw_error error = {0};

	slow = wrong = credulous = absent = *library(0);
	slow.seal = seal_slowly;
	wrong.name = "wrong";
	wrong.seal = seal_wrongly;
	credulous.open = open_anything;
	absent.make = cannot_make;
	CHECK(iswi_seal_fastest(some, &error) == &slow);
	some[3] = NULL;
	CHECK(iswi_seal_fastest(some, &error) == NULL);
	CHECK_EQ(error.code, -ENOTSUP);
	some[1] = NULL;
	CHECK(iswi_seal_fastest(some, &error) == NULL);
	CHECK(strstr(error.text, "wrong") != NULL);
	CHECK(strstr(error.text, "self-test") != NULL);
}

static int cannot_load(uint32_t keys, struct iswi_sealer **sealer_out)
{
	(void)keys;
	(void)sealer_out;
	return -ENOENT;
}

TEST(test_a_host_without_the_library_is_told_what_to_install)
{
	struct iswi_seal_ops absent = *library(0);
	const struct iswi_seal_ops *some[] = {&absent, NULL};
	struct isw_error error = {0};

	absent.make = cannot_load;
	CHECK(iswi_seal_fastest(some, &error) == NULL);
	CHECK_EQ(error.code, -ENOTSUP);
	CHECK(strstr(error.text, "it is not installed; install OpenSSL 3") != NULL);
	CHECK(strstr(error.text, "libssl3") != NULL);
}

TEST(test_the_fastest_is_chosen)
{
	struct iswi_seal_ops slow = *library(0);
	const struct iswi_seal_ops *some[] = {&slow, library(0), NULL};

	slow.seal = seal_slowly;
	CHECK(iswi_seal_fastest(some, NULL) == library(0));
	some[0] = library(0);
	some[1] = &slow;
	CHECK(iswi_seal_fastest(some, NULL) == library(0));
}

TEST(test_every_library_of_this_build_is_right)
{
	struct isw_error error = {0};
	const char *name = NULL;

	for (uint32_t n = 0; library(n) != NULL; n++) {
		const struct iswi_seal_ops *only[] = {library(n), NULL};

		CHECK_OK(iswi_seal_fastest(only, &error) == NULL, error);
	}
	CHECK_OK(isw_seal_check(&name, &error), error);
	CHECK(name != NULL);
	CHECK(isw_features() & ISW_FEATURE_SEAL);
}

/* In every build: of one that has no library the error says what to install. */
static void check_without_library(void)
{
	const struct iswi_seal_ops *const none[] = {NULL};
	struct isw_error error = {0};

	CHECK(iswi_seal_fastest(none, &error) == NULL);
	CHECK_EQ(error.code, -ENOTSUP);
	CHECK(strstr(error.text, "apt install libssl-dev") != NULL);
}

int main(void)
{
	const char *name;

	check_without_library();
	if (library(0) == NULL) {
		CHECK(!(isw_features() & ISW_FEATURE_SEAL));
		CHECK_EQ(isw_seal_check(&name, NULL), -ENOTSUP);
		SKIP("this build has no OpenSSL (libssl-dev)");
	}
	return run_tests();
}
