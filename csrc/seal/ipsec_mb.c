// SPDX-License-Identifier: Apache-2.0
/*
 * Sealing by Intel's Multi-Buffer Crypto for IPsec (libIPSec_MB), version 1.3 or later.
 *
 * Its functions for GCM keep nothing of their own: they read an expanded key and work in a context
 * on the stack, so threads do not meet. All of a sealer lies in memory of ours.
 */
#include "seal/seal.h"

#include <assert.h>
#include <errno.h>
#include <intel-ipsec-mb.h>
#include <string.h>

#define PROCESSOR_NEEDS (IMB_FEATURE_AESNI | IMB_FEATURE_PCLMULQDQ)

/* The library was built with this alignment; its header asks for it only inside that build. */
struct expanded_key {
	_Alignas(64) struct gcm_key_data data;
};

struct ipsec_mb_sealer {
	aes_gcm_pre_t expand;
	aes_gcm_enc_dec_t seal, open;
	size_t bytes; /* of all this memory */
	uint32_t keys;
	struct expanded_key key[];
};

static struct ipsec_mb_sealer *own(struct iswi_sealer *sealer)
{
	return (struct ipsec_mb_sealer *)sealer;
}

static void ipsec_mb_seal(struct iswi_sealer *sealer, const struct iswi_sealing *what,
			  unsigned char *tag_out)
{
	const struct ipsec_mb_sealer *s = own(sealer);
	struct gcm_context_data context;

	assert(what->key < s->keys);
	s->seal(&s->key[what->key].data, &context, what->out, what->in, what->bytes, what->nonce,
		what->data, what->data_bytes, tag_out, ISWI_SEAL_TAG_BYTES);
}

static bool ipsec_mb_open(struct iswi_sealer *sealer, const struct iswi_sealing *what,
			  const unsigned char *tag)
{
	const struct ipsec_mb_sealer *s = own(sealer);
	unsigned char computed[ISWI_SEAL_TAG_BYTES];
	struct gcm_context_data context;

	assert(what->key < s->keys);
	s->open(&s->key[what->key].data, &context, what->out, what->in, what->bytes, what->nonce,
		what->data, what->data_bytes, computed, sizeof(computed));
	if (iswi_seal_tags_equal(computed, tag))
		return true;
	if (what->bytes > 0)
		memset(what->out, 0, what->bytes);
	return false;
}

static void ipsec_mb_set_key(struct iswi_sealer *sealer, uint32_t number, const unsigned char *key)
{
	struct ipsec_mb_sealer *s = own(sealer);

	assert(number < s->keys);
	s->expand(key, &s->key[number].data);
}

static void ipsec_mb_destroy(struct iswi_sealer *sealer)
{
	if (sealer != NULL)
		iswi_seal_memory_end(sealer, own(sealer)->bytes);
}

/* The functions for this processor. All else that a manager has is for jobs, which we do not use.
 */
static int find_functions(struct ipsec_mb_sealer *s)
{
	IMB_MGR *manager = alloc_mb_mgr(0);
	int code = 0;

	if (manager == NULL)
		return -ENOMEM;
	init_mb_mgr_auto(manager, NULL);
	/* Without these instructions the library computes by tables, whose timing tells the key. */
	if ((manager->features & PROCESSOR_NEEDS) != PROCESSOR_NEEDS ||
	    imb_get_errno(manager) != 0 || manager->gcm256_enc == NULL) {
		code = -ENOTSUP;
	} else {
		s->expand = manager->gcm256_pre;
		s->seal = manager->gcm256_enc;
		s->open = manager->gcm256_dec;
	}
	free_mb_mgr(manager);
	return code;
}

static int ipsec_mb_make(uint32_t keys, struct iswi_sealer **sealer_out)
{
	const size_t bytes = sizeof(struct ipsec_mb_sealer) + keys * sizeof(struct expanded_key);
	struct ipsec_mb_sealer *s;
	void *memory;
	int code = iswi_seal_memory_make(bytes, &memory);

	if (code != 0)
		return code;
	s = memory;
	s->bytes = bytes;
	s->keys = keys;
	code = find_functions(s);
	if (code != 0) {
		iswi_seal_memory_end(s, bytes);
		return code;
	}
	*sealer_out = (struct iswi_sealer *)s;
	return 0;
}

const struct iswi_seal_ops iswi_seal_ipsec_mb = {
	.name = "Intel ipsec-mb",
	.make = ipsec_mb_make,
	.destroy = ipsec_mb_destroy,
	.set_key = ipsec_mb_set_key,
	.seal = ipsec_mb_seal,
	.open = ipsec_mb_open,
};
