// SPDX-License-Identifier: Apache-2.0
/*
 * Sealing by OpenSSL's libcrypto (EVP), version 3.0 or later. The host's own is loaded at run time,
 * so that its security fixes reach a wheel's users too (ADR 43); nothing is linked.
 *
 * EVP does its work in contexts, each of which one thread may use at a time, so a sealer has a pool
 * of pairs: one context that seals, one that opens. A thread takes a pair for one page. A context
 * remembers which key it has, and gets another one only where it must. OpenSSL allocates where a
 * context gets its algorithm (make), but not where it gets a key or a nonce.
 *
 * OpenSSL keeps the expanded keys of its contexts in the heap, at addresses that it does not tell.
 * So the heap as it is when they have been made is left out of core dumps, all of it.
 */
#include "seal/seal.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <openssl/evp.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "util/util.h"

/* More than the threads of a device that work on pages at once, mostly. */
#define PAIRS       64u
#define RETRY_NS    20000
#define BLOCK_BYTES 16u

struct libcrypto {
	__typeof__(EVP_CIPHER_fetch) *cipher_fetch;
	__typeof__(EVP_CIPHER_free) *cipher_free;
	__typeof__(EVP_CIPHER_CTX_new) *context_new;
	__typeof__(EVP_CIPHER_CTX_free) *context_free;
	__typeof__(EVP_CIPHER_CTX_ctrl) *context_ctrl;
	__typeof__(EVP_CipherInit_ex) *init;
	__typeof__(EVP_CipherUpdate) *update;
	__typeof__(EVP_CipherFinal_ex) *final;
};

struct raw_key {
	uint64_t version; /* 0: there is none yet */
	unsigned char bytes[ISWI_SEAL_KEY_BYTES];
};

struct keyed_context {
	EVP_CIPHER_CTX *evp;
	uint64_t version; /* of the key that it has, 0: none */
	uint32_t number;
};

struct openssl_sealer {
	/*
	 * A bit per pair: whether a thread has it. Set with acquire and cleared with release: a
	 * thread sees what the one before did with the pair.
	 */
	atomic_uint_fast64_t taken;
	size_t bytes; /* of all this memory */
	uint32_t keys;
	struct libcrypto lib;
	EVP_CIPHER *cipher;
	struct keyed_context seal[PAIRS], open[PAIRS];
	struct raw_key key[];
};

static struct openssl_sealer *own(struct iswi_sealer *sealer)
{
	return (struct openssl_sealer *)sealer;
}

/* ------------------------------------------------------------------------ the pool */

/*
 * Each key begins its search at another pair, so that threads with different keys seldom take
 * pairs from each other and key them again.
 *
 * Where all pairs are taken this looks again after a short sleep. (A yield would give a real-time
 * thread's time to no ordinary one.) That is bounded: a pair is taken for one page's computation,
 * in which nobody waits for anything.
 */
static uint32_t take(struct openssl_sealer *s, uint32_t number)
{
	const struct timespec retry = {.tv_nsec = RETRY_NS};
	const uint32_t first = number * 2 % PAIRS;

	for (;;) {
		uint_fast64_t taken = atomic_load_explicit(&s->taken, memory_order_relaxed);

		while (taken != UINT64_MAX) {
			uint64_t turned = ~taken >> first;
			uint32_t pair;

			if (turned != 0)
				pair = first + (uint32_t)__builtin_ctzll(turned);
			else
				pair = (uint32_t)__builtin_ctzll(~taken);
			if (atomic_compare_exchange_weak_explicit(
				    &s->taken, &taken, taken | UINT64_C(1) << pair,
				    memory_order_acquire, memory_order_relaxed))
				return pair;
		}
		nanosleep(&retry, NULL);
	}
}

static void give_back(struct openssl_sealer *s, uint32_t pair)
{
	atomic_fetch_and_explicit(&s->taken, ~(UINT64_C(1) << pair), memory_order_release);
}

/* ------------------------------------------------------------------------- sealing */

/* Gives the context the nonce, and the key unless it has that already. */
static bool begin(const struct openssl_sealer *s, struct keyed_context *context,
		  const struct iswi_sealing *what, int sealing)
{
	const struct raw_key *key = &s->key[what->key];
	bool has_it = context->number == what->key && context->version == key->version;

	assert(what->key < s->keys && key->version > 0);
	assert(what->bytes <= INT_MAX && what->data_bytes <= INT_MAX);
	context->version = 0;
	if (s->lib.init(context->evp, NULL, NULL, has_it ? NULL : key->bytes, what->nonce,
			sealing) != 1)
		return false;
	context->number = what->key;
	context->version = key->version;
	return true;
}

static bool compute(const struct libcrypto *lib, EVP_CIPHER_CTX *evp,
		    const struct iswi_sealing *what)
{
	int bytes;

	if (what->data_bytes > 0 &&
	    lib->update(evp, NULL, &bytes, what->data, (int)what->data_bytes) != 1)
		return false;
	return what->bytes == 0 ||
	       lib->update(evp, what->out, &bytes, what->in, (int)what->bytes) == 1;
}

static bool finish(const struct libcrypto *lib, EVP_CIPHER_CTX *evp)
{
	unsigned char none[BLOCK_BYTES];
	int bytes;

	return lib->final(evp, none, &bytes) == 1;
}

static void openssl_seal(struct iswi_sealer *sealer, const struct iswi_sealing *what,
			 unsigned char *tag_out)
{
	struct openssl_sealer *s = own(sealer);
	const uint32_t pair = take(s, what->key);
	EVP_CIPHER_CTX *evp = s->seal[pair].evp;
	bool sealed =
		begin(s, &s->seal[pair], what, 1) && compute(&s->lib, evp, what) &&
		finish(&s->lib, evp) &&
		s->lib.context_ctrl(evp, EVP_CTRL_AEAD_GET_TAG, ISWI_SEAL_TAG_BYTES, tag_out) == 1;

	give_back(s, pair);
	/* With valid arguments nothing fails: the context has all that it needs since make. */
	assert(sealed);
	(void)sealed;
}

static bool openssl_open(struct iswi_sealer *sealer, const struct iswi_sealing *what,
			 const unsigned char *tag)
{
	struct openssl_sealer *s = own(sealer);
	const uint32_t pair = take(s, what->key);
	EVP_CIPHER_CTX *evp = s->open[pair].evp;
	unsigned char expected[ISWI_SEAL_TAG_BYTES]; /* EVP takes no pointer to const */
	bool opened;

	memcpy(expected, tag, sizeof(expected));
	opened = begin(s, &s->open[pair], what, 0) &&
		 s->lib.context_ctrl(evp, EVP_CTRL_AEAD_SET_TAG, ISWI_SEAL_TAG_BYTES, expected) ==
			 1 &&
		 compute(&s->lib, evp, what) && finish(&s->lib, evp);
	give_back(s, pair);
	if (!opened && what->bytes > 0)
		memset(what->out, 0, what->bytes);
	return opened;
}

static void openssl_set_key(struct iswi_sealer *sealer, uint32_t number, const unsigned char *key)
{
	struct openssl_sealer *s = own(sealer);

	assert(number < s->keys);
	memcpy(s->key[number].bytes, key, ISWI_SEAL_KEY_BYTES);
	s->key[number].version++;
}

/* ---------------------------------------------------------------------------- life */

static void openssl_destroy(struct iswi_sealer *sealer)
{
	struct openssl_sealer *s = own(sealer);

	if (s == NULL)
		return;
	for (uint32_t i = 0; i < PAIRS; i++) {
		s->lib.context_free(s->seal[i].evp); /* overwrites its expanded key */
		s->lib.context_free(s->open[i].evp);
	}
	s->lib.cipher_free(s->cipher);
	iswi_seal_memory_end(s, s->bytes);
}

static int load(struct libcrypto *lib)
{
	const struct iswi_function wanted[] = {
		{"EVP_CIPHER_fetch", &lib->cipher_fetch},
		{"EVP_CIPHER_free", &lib->cipher_free},
		{"EVP_CIPHER_CTX_new", &lib->context_new},
		{"EVP_CIPHER_CTX_free", &lib->context_free},
		{"EVP_CIPHER_CTX_ctrl", &lib->context_ctrl},
		{"EVP_CipherInit_ex", &lib->init},
		{"EVP_CipherUpdate", &lib->update},
		{"EVP_CipherFinal_ex", &lib->final},
	};

	return iswi_load_functions("libcrypto.so.3", "libssl3", wanted, ISWI_ARRAY_LEN(wanted),
				   NULL);
}

static int make_context(struct openssl_sealer *s, struct keyed_context *context, int sealing)
{
	context->evp = s->lib.context_new();
	if (context->evp == NULL)
		return -ENOMEM;
	return s->lib.init(context->evp, s->cipher, NULL, NULL, NULL, sealing) == 1 ? 0 : -ENOTSUP;
}

static bool has_context(const struct openssl_sealer *s, uintptr_t begin, uintptr_t end)
{
	for (uint32_t i = 0; i < PAIRS; i++) {
		const uintptr_t at[] = {(uintptr_t)s->seal[i].evp, (uintptr_t)s->open[i].evp};

		if ((at[0] >= begin && at[0] < end) || (at[1] >= begin && at[1] < end))
			return true;
	}
	return false;
}

/* A context and what will hold its key were allocated one after the other, in one mapping. */
static int leave_out_of_dumps(const struct openssl_sealer *s)
{
	FILE *maps = fopen("/proc/self/maps", "re");
	uintptr_t begin, end;
	char line[512];
	int code = 0;

	if (maps == NULL)
		return -errno;
	while (code == 0 && fgets(line, sizeof(line), maps) != NULL)
		if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &begin, &end) == 2 &&
		    has_context(s, begin, end) &&
		    madvise((void *)begin, end - begin, MADV_DONTDUMP) != 0)
			code = -errno;
	fclose(maps);
	return code;
}

static int openssl_make(uint32_t keys, struct iswi_sealer **sealer_out)
{
	const size_t bytes = sizeof(struct openssl_sealer) + keys * sizeof(struct raw_key);
	struct openssl_sealer *s;
	void *memory;
	int code = iswi_seal_memory_make(bytes, &memory);

	if (code != 0)
		return code;
	s = memory;
	s->bytes = bytes;
	s->keys = keys;
	code = load(&s->lib);
	if (code != 0) {
		iswi_seal_memory_end(s, bytes);
		return code;
	}
	s->cipher = s->lib.cipher_fetch(NULL, "AES-256-GCM", NULL);
	if (s->cipher == NULL)
		code = -ENOTSUP;
	for (uint32_t i = 0; i < PAIRS && code == 0; i++) {
		code = make_context(s, &s->seal[i], 1);
		if (code == 0)
			code = make_context(s, &s->open[i], 0);
	}
	if (code == 0)
		code = leave_out_of_dumps(s);
	if (code != 0) {
		openssl_destroy((struct iswi_sealer *)s);
		return code;
	}
	*sealer_out = (struct iswi_sealer *)s;
	return 0;
}

const struct iswi_seal_ops iswi_seal_openssl = {
	.name = "OpenSSL",
	.make = openssl_make,
	.destroy = openssl_destroy,
	.set_key = openssl_set_key,
	.seal = openssl_seal,
	.open = openssl_open,
};
